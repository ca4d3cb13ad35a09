"""`baretrain bench`: what its figures are, and that a measurement is a run that leaves nothing."""

import dataclasses
import json

import pytest
from running import TINY, run

from train.config import Failure
from train.run import compose as cli
from train.run.stopping import StoppedEarly
from train.tools.alone import temporary_run
from train.tools.bench.speeds import Peak, TimedSteps, speeds, table

SPREAD = {"median": float, "least": float, "most": float}
SPREADS = ("step_s", "tokens_per_s")
KINDS = {
    "padding_share mfu flops_per_s peak_flops_per_s data_wait_share compile_s": float,
    "graphs peak_process_bytes world_size global_batch_size micro_batch_size accumulation threads": int,
    "kind peak_source host": str,
    "peak_device_bytes": type(None),
    "versions": dict,
    "processor": str | None,
}


# ---- arithmetic ----------------------------------------------------------------------------------------------------

WINDOWS = [
    TimedSteps(steps=2, wall_s=1.0, tokens=90.0, slots=100.0, flops=4e9, wait_s=0.1),
    TimedSteps(
        steps=2, wall_s=2.0, tokens=100.0, slots=100.0, flops=4e9, wait_s=0.5, compile_s=3.0
    ),
    TimedSteps(steps=2, wall_s=1.0, tokens=95.0, slots=100.0, flops=4e9, wait_s=0.2),
]


def test_speeds_are_of_whole_windows_and_shares_of_all_the_time_and_what_is_unknown_is_left_out():
    result = speeds(WINDOWS, peak=Peak(12e9, "made up"))
    assert result["step_s"] == {"median": 0.5, "least": 0.5, "most": 1.0}
    assert result["tokens_per_s"] == {"median": 90.0, "least": 50.0, "most": 95.0}
    assert result["padding_share"] == pytest.approx(15 / 300)
    assert result["flops_per_s"] == 3e9 and result["mfu"] == 0.25  # 12e9 in 4 s, of 12e9 a second
    assert result["data_wait_share"] == pytest.approx(0.2)
    assert result["compile_s_in_timed_steps"] == 3.0 and result["timed_s"] == 4.0
    unknown = [dataclasses.replace(each, flops=0.0) for each in WINDOWS]
    assert speeds(unknown, peak=Peak(1e9, ""))["mfu"] is None


def test_a_stop_before_there_are_figures_is_one_line():
    with pytest.raises(Failure, match="^stopped on SIGTERM: "), temporary_run("bench"):
        raise StoppedEarly("SIGTERM")


# ---- a measurement -------------------------------------------------------------------------------------------------


def settings(prepared, *more):
    """A measurement of seconds; the data is the only thing that it may not do without."""
    device = ["backend.device=cpu", "backend.precision=fp32", "data.num_workers=0"]
    return [*TINY, f"data.path={prepared}", *device, "steps=4", "warmup=1", *more]


def test_a_measurement_is_a_run_that_leaves_only_its_figures(tmp_path, prepared):
    (tmp_path / "tmp").mkdir()
    output = tmp_path / "bench.json"
    more = [f"output={output}", f"run_dir={tmp_path}/run", "max_epochs=1", "profile=true"]
    given = settings(prepared, "global_batch_size=8", *more)
    done = run(given, ranks=2, module="bench", env={"TMPDIR": str(tmp_path / "tmp")})
    assert done.returncode == cli.DONE, done.stderr
    result = json.loads(output.read_text())
    for keys, kind in KINDS.items():
        assert all(isinstance(result[key], kind) for key in keys.split()), keys
    for key in SPREADS:
        assert {name: type(value) for name, value in result[key].items()} == SPREAD
        assert 0 < result[key]["least"] <= result[key]["median"] <= result[key]["most"]
    assert (result["world_size"], result["micro_batch_size"], result["accumulation"]) == (2, 4, 1)
    assert result["mfu"] == pytest.approx(result["flops_per_s"] / result["peak_flops_per_s"])
    assert "measured here" in result["peak_source"] and 0 <= result["data_wait_share"] <= 1
    assert result["settings"] == given
    assert done.stdout == table(result) + "\n"  # rank 0's
    assert [
        path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("baretrain")
    ] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "tmp"]
