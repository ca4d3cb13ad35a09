"""profile=true: a trace of some steps, a page of shares and advice, and a training that does not notice."""

import gzip
import json
from types import SimpleNamespace

from running import lines, run, train_here, train_overrides
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from train.telemetry.profile import covered_s, page

SETTINGS = ["backend=ddp", "profile=true", "profile_after=2", "profile_steps=2"]


def test_a_run_is_traced_and_trains_as_without(prepared, tmp_path, capfd):
    for name, settings in (("plain", SETTINGS[:1]), ("traced", SETTINGS), ("short", [*SETTINGS, "max_steps=3"])):
        train_here(tmp_path / name, prepared, *settings, "export=false")
    losses = [[line["loss"] for line in lines(tmp_path / name, "train")] for name in ("plain", "traced")]
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain/profile").exists() and not (tmp_path / "short/profile").exists()
    assert "ended before 2 steps were traced" in capfd.readouterr().err
    text = (tmp_path / "traced/profile/summary.md").read_text()
    assert text.startswith("# Profile: ddp on cpu, fp32: 2 steps in ")
    assert "aten::addmm" in text and "## What to try\n\n- " in text
    with gzip.open(tmp_path / "traced/profile/trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert sum("Optimizer.step" in str(name) for name in names) == 2


def test_a_run_through_xla_adds_what_its_device_says(prepared, tmp_path):
    settings = ["backend=xla", "eval_every=null", "export=false", *SETTINGS[1:]]
    result = run(train_overrides(tmp_path / "run", prepared, *settings))
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "run/profile/summary.md").read_text()
    assert text.startswith("# Profile: xla on cpu through XLA") and "CompileTime" in text
    assert lines(tmp_path / "run", "summary")[0]["graphs"] == 2  # tracing added none


def event(name, start_s, end_s, *, device="cpu", **more):
    """An event as PyTorch's profiler returns it."""
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    more = {"thread": 1, "stack": [], "use_device": "cuda", "device_type": kind, **more}
    return FunctionEvent(0, name, start_us=1e6 * start_s, end_us=1e6 * end_s, **more)


def page_on(*events, wait_s=0.0, may_compile=False):
    """The page on a window of 4 seconds."""
    events = EventList(events, use_device="cuda")
    events._build_tree()
    tracing = SimpleNamespace(key_averages=events.key_averages, events=lambda: events)
    return page(tracing, title="t", window_s=4.0, wait_s=wait_s, may_compile=may_compile)


def test_a_device_of_its_own_is_what_is_looked_at():
    assert covered_s([event("a", *span) for span in ((5, 7), (0, 2), (1, 3), (6, 6.5))]) == 5
    host = event("aten::mm", 0, 9)
    host.append_kernel("gemm_kernel", 0, 2e6)
    kernels = [event("gemm_kernel", 0, 2, device="cuda"), event("ncclDevKernel_AllReduce", 1, 3, device="cuda")]
    annotation = event("Optimizer.step#AdamW.step", 0, 4, device="cuda", is_user_annotation=True)
    text = page_on(host, *kernels, annotation, wait_s=1.0)
    assert "| the device idle | 25.0% |" in text and "| waiting for data | 25.0% |" in text
    assert "with nothing beside it | 25.0% |" in text and "gemm_kernel" in text


def test_waiting_for_another_rank_is_no_work_of_the_host():
    asynchronous = event("gloo:all_reduce", 0, 4, thread=2, is_async=True, is_user_annotation=True)
    text = page_on(event("aten::mm", 0, 1), asynchronous, event("record_param_comms", 3.9, 4.0))
    assert "| the training's thread idle | 72.5% |" in text and "with nothing beside it | 75.0% |" in text
    assert "wait for a slow one" in text and "wait for the host" not in text


def test_each_share_has_its_advice():
    quiet = page_on(event("aten::mm", 0, 4.0))
    for text, idea in (
        (page_on(event("aten::mm", 0, 4.0), wait_s=0.4), "raise data.num_workers"),
        (page_on(event("aten::mm", 0, 2.0, device="cuda")), "The device waits for the host"),
        (page_on(event("gloo:all_reduce", 0, 4.0)), "see docs/slow-links.md"),
        (page_on(event("aten::mm", 0, 4.0), may_compile=True), "backend.compile=layers"),
    ):
        assert idea in text and idea not in quiet
