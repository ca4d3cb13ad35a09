"""profile=true: a trace of some steps, a page of shares and advice, and a training that does not notice."""

import gzip
import json
from types import SimpleNamespace

import pytest
from running import lines, run, train_config, train_overrides
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from train import loop
from train.attempt.preempt import StopRequest
from train.cli.command import REFUSED
from train.telemetry.profile import PRODUCTS, Operation, Traced, advice, covered, page, summarise

SETTINGS = ["backend=ddp", "profile=true", "profile_after=2", "profile_steps=2"]


def traced(*operations, window_s=2.0, wait_s=0.0, busy_s=2.0, exchange_s=0.0, is_on_host=True):
    operations = [Operation(name, 4, self_s) for name, self_s in operations]
    return Traced(2, window_s, wait_s, busy_s, exchange_s, operations, is_on_host)


def test_a_run_is_traced_and_trains_as_without(prepared, tmp_path):
    for name, settings in (("plain", SETTINGS[:1]), ("traced", SETTINGS)):
        loop.run(train_config(tmp_path / name, prepared, *settings), StopRequest())
    losses = [[line["loss"] for line in lines(tmp_path / name, "train")] for name in ("plain", "traced")]
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain/profile").exists()
    text = (tmp_path / "traced/profile/summary.md").read_text()
    assert text.startswith("# Profile: ddp on cpu, fp32") and "\n2 steps in " in text
    assert "`aten::addmm`" in text and "## What to try\n\n- " in text
    with gzip.open(tmp_path / "traced/profile/trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert sum("Optimizer.step" in str(name) for name in names) == 2


def test_a_run_through_xla_adds_what_its_device_says(prepared, tmp_path):
    result = run(train_overrides(tmp_path / "run", prepared, "backend=xla", "eval_every=null", *SETTINGS[1:]))
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "run/profile/summary.md").read_text()
    assert text.startswith("# Profile: xla on cpu through XLA") and "CompileTime" in text
    assert lines(tmp_path / "run", "summary")[0]["graphs"] == 2  # tracing added none


def test_an_attempt_that_ends_before_says_so(prepared, tmp_path):
    result = run(train_overrides(tmp_path / "run", prepared, *SETTINGS, "max_steps=3"))
    assert result.returncode == 0 and "ended before 2 steps were traced" in result.stderr + result.stdout
    assert not (tmp_path / "run/profile").exists()


def test_no_step_to_trace_is_refused(prepared, tmp_path):
    result = run(train_overrides(tmp_path / "run", prepared, "profile=true", "profile_steps=0"))
    assert result.returncode == REFUSED and "profile_steps=0 must be 1 or more" in result.stderr


def test_spans_that_overlap_count_once():
    assert covered([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert covered([]) == 0


def event(name, start_s, end_s, *, device="cpu", **more):
    """An event as PyTorch's profiler gives it."""
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    more = {"thread": 1, "stack": [], "use_device": "cuda", "device_type": kind, **more}
    return FunctionEvent(0, name, start_us=1e6 * start_s, end_us=1e6 * end_s, **more)


def seen_in(*events, window_s=4.0, wait_s=1.0):
    events = EventList(events, use_device="cuda")
    events._build_tree()
    return summarise(SimpleNamespace(key_averages=events.key_averages, events=lambda: events), 2, window_s, wait_s)


def test_a_device_of_its_own_is_what_is_looked_at():
    host = event("aten::mm", 0, 9)
    host.append_kernel("gemm_kernel", 0, 2e6)
    kernels = [event("gemm_kernel", 0, 2, device="cuda"), event("ncclDevKernel_AllReduce", 1, 3, device="cuda")]
    annotation = event("Optimizer.step#AdamW.step", 0, 4, device="cuda", is_user_annotation=True)
    seen = seen_in(host, *kernels, annotation)
    assert {each.name: each.self_s for each in seen.operations} == {"gemm_kernel": 2, "ncclDevKernel_AllReduce": 2}
    assert seen.busy_s == 3 and seen.idle == 0.25 and seen.exchange_s == 1 and not seen.is_on_host
    text = page(seen, title="t", may_compile=True)
    assert "| the device idle | 25.0% |" in text and "| waiting for data | 25.0% |" in text


def test_waiting_for_another_rank_is_no_work_of_the_host():
    asynchronous = event("gloo:all_reduce", 0, 4, thread=2, is_async=True, is_user_annotation=True)
    seen = seen_in(event("aten::mm", 0, 1), asynchronous, event("record_param_comms", 3.9, 4.0), wait_s=0.0)
    assert seen.is_on_host and seen.busy_s == pytest.approx(1.1) and seen.exchange_s == pytest.approx(3)
    assert seen.share(PRODUCTS) == pytest.approx(1 / 1.1)
    (only,) = advice(seen, may_compile=True)
    assert "wait for a slow one" in only


@pytest.mark.parametrize(
    ("seen", "idea"),
    [
        (traced(("aten::mm", 1.0), wait_s=0.2), "raise data.num_workers"),
        (traced(("gemm", 1.0), busy_s=1.0, is_on_host=False), "The device waits for the host"),
        (traced(("aten::mm", 1.0), exchange_s=0.5), "see docs/slow-links.md"),
        (traced(("aten::mm", 1.0), ("Optimizer.step#AdamW.step", 0.5)), "raise global_batch_size"),
        (traced(("aten::mm", 1.0), ("aten::gelu", 1.0)), "backend.compile=layers fuses it"),
        (traced(("aten::mm", 1.0)), "Nothing stands out"),
    ],
)
def test_each_share_has_its_advice(seen, idea):
    (only,) = advice(seen, may_compile=True)
    assert idea in only
    assert not any("backend.compile" in each for each in advice(seen, may_compile=False))
