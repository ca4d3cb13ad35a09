"""`python -m train.bench`: what its figures are, that a measurement is a run that leaves nothing, and its sweep."""

import dataclasses
import json
import signal
import sys

import pytest
from running import TINY, run

from train.config import Failure, InputError, InstanceConfig
from train.run import compose as cli
from train.tools.bench import command as bench
from train.tools.bench import sweep
from train.tools.bench.config import BenchConfig
from train.tools.bench.speeds import Peak, TimedSteps, cost, speeds, table
from train.tools.bench.sweep import Try, outcome_of, search, try_size

SPREAD = {"median": float, "least": float, "most": float}
SPREADS = ("steps_per_s", "step_s", "sequences_per_s", "tokens_per_s")
KINDS = {
    "padding_share mfu flops_per_s peak_flops_per_s data_wait_share compile_s": float,
    "graphs peak_process_bytes world_size global_batch_size micro_batch_size accumulation threads": int,
    "kind peak_source host": str,
    "peak_device_bytes usd_per_million_sequences": type(None),
    "versions": dict,
    "processor": str | None,
}


# ---- arithmetic ----------------------------------------------------------------------------------------------------

WINDOWS = [
    TimedSteps(steps=2, wall_s=1.0, tokens=90.0, slots=100.0, flops=4e9, wait_s=0.1),
    TimedSteps(steps=2, wall_s=2.0, tokens=100.0, slots=100.0, flops=4e9, wait_s=0.5, compile_s=3.0),
    TimedSteps(steps=2, wall_s=1.0, tokens=95.0, slots=100.0, flops=4e9, wait_s=0.2),
]


def test_speeds_are_of_whole_windows_and_shares_of_all_the_time_and_what_is_unknown_is_left_out():
    result = speeds(WINDOWS, global_batch_size=8, peak=Peak(12e9, "made up"))
    assert result["step_s"] == {"median": 0.5, "least": 0.5, "most": 1.0}
    assert result["sequences_per_s"] == {"median": 16.0, "least": 8.0, "most": 16.0}
    assert result["tokens_per_s"] == {"median": 90.0, "least": 50.0, "most": 95.0}
    assert result["padding_share"] == pytest.approx(15 / 300)
    assert result["flops_per_s"] == 3e9 and result["mfu"] == 0.25  # 12e9 in 4 s, of 12e9 a second
    assert result["data_wait_share"] == pytest.approx(0.2)
    assert result["compile_s_in_timed_steps"] == 3.0 and result["timed_s"] == 4.0
    unknown = [dataclasses.replace(each, flops=0.0) for each in WINDOWS]
    assert speeds(unknown, global_batch_size=8, peak=Peak(1e9, ""))["mfu"] is None
    priced = InstanceConfig(usd_per_hour=36.0, price_date="2026-11-09")
    known = cost(priced, machines=2, sequences_per_s=1000.0)  # 1000 s of 2 machines at a cent a second
    assert known["usd_per_million_sequences"] == pytest.approx(20.0) and known["price_date"] == "2026-11-09"
    assert cost(InstanceConfig(), machines=1, sequences_per_s=5.0)["usd_per_million_sequences"] is None


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
    done = run(given, ranks=2, module="train.bench", env={"TMPDIR": str(tmp_path / "tmp")})
    assert done.returncode == cli.DONE, done.stderr
    result = json.loads(output.read_text())
    for keys, kind in KINDS.items():
        assert all(isinstance(result[key], kind) for key in keys.split()), keys
    for key in SPREADS:
        assert {name: type(value) for name, value in result[key].items()} == SPREAD
        assert 0 < result[key]["least"] <= result[key]["median"] <= result[key]["most"]
    assert (result["world_size"], result["micro_batch_size"], result["accumulation"]) == (2, 4, 1)
    assert (result["timed_steps"], result["untimed_steps"], result["windows"]) == (4, 1, 4)
    assert result["mfu"] == pytest.approx(result["flops_per_s"] / result["peak_flops_per_s"])
    assert "measured here" in result["peak_source"] and 0 <= result["data_wait_share"] <= 1
    assert result["settings"] == given
    assert done.stdout == table(result) + "\n"  # rank 0's
    assert [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("baretrain")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "tmp"]


def test_a_sweep_under_torchrun_is_rejected(prepared, monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    assert bench.main([*settings(prepared, "global_batch_size=8"), "--sweep"]) == cli.REJECTED
    assert "run it without torchrun, with nproc=N" in capsys.readouterr().err


# ---- the order of a sweep ------------------------------------------------------------------------------------------


def swept(sizes, first, speed):
    """The sizes that a search tries, and why it ended; `speed` returns None for a size that does not fit."""
    tried = []

    def attempt(size):
        tried.append(size)
        tokens_per_s = speed(size)
        bench = None if tokens_per_s is None else {"tokens_per_s": {"median": tokens_per_s}}
        return Try(size, 1, "", bench)

    return tried, search(sizes, first, attempt)


TO_128 = [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize(
    ("sizes", "first", "speed", "tries", "said"),
    [
        # One that does not fit is halved.
        (TO_128, 64, lambda size: 1.0 if size <= 8 else None, [64, 32, 16, 8], "8 is the largest micro batch"),
        (TO_128, 2, lambda size: None, [2, 1], "no micro batch fits"),
        # Nothing larger is tried once throughput no longer grows; a smaller one may be the fastest.
        (TO_128, 1, lambda size: min(size, 8.0), [1, 2, 4, 8, 16, 32], "throughput no longer grows; 32 still fits"),
        (TO_128, 16, lambda size: 1 / size, [16, 8, 32, 64], "throughput no longer grows; 64 still fits"),
        ([1, 2, 3, 6], 2, float, [2, 1, 6], "6 is the largest micro batch that global_batch_size"),
    ],
)
def test_sizes_double_until_one_does_not_fit_or_is_no_faster(sizes, first, speed, tries, said):
    tried, ended = swept(sizes, first, speed)
    assert tried == tries and ended.startswith(said)


def test_the_limit_is_bisected():
    tried, ended = swept(list(range(1, 101)), 8, lambda size: float(size) if size <= 41 else None)
    assert {41, 42} <= set(tried) and len(tried) <= 10 and ended == "41 is the largest micro batch that fits"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], (4, [1, 2, 4], 4)),
        (["parallel=pipeline", "model.architecture=bert", "model.num_layers=2"], (8, [4, 8], 8)),  # of four parts each
        (["nproc=3"], "global_batch_size=8 over nproc=3 ranks"),
    ],
    ids=["halves", "two stages", "three"],
)
def test_micro_batches_divide_the_share_of_a_replica(given, expected):
    cli.add_schema(BenchConfig, "bench", [])
    own = ["experiment=demo", "sweep=true", "nproc=2", "global_batch_size=8", "micro_batch_size=null", *given]
    cfg = cli.load_config(BenchConfig, own)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            sweep.sizes_of(cfg)
    else:
        assert sweep.sizes_of(cfg) == expected


# ---- a try ---------------------------------------------------------------------------------------------------------


KILLED = "does not fit: the kernel killed it for lack of host memory"


@pytest.mark.parametrize(
    ("status", "kind", "kills", "verdict"),
    [
        (0, "bench", 0, "fits"),
        (1, "out_of_device_memory", 0, "does not fit: out of device memory"),
        (-signal.SIGKILL, None, 0, KILLED),
        (1, None, 1, KILLED),
        (1, None, 0, None),
        (2, "strange", 0, None),
    ],
)
def test_only_a_lack_of_memory_does_not_fit(status, kind, kills, verdict):
    assert outcome_of(status, {"kind": kind} if kind else {}, kills) == verdict


def test_a_try_that_fails_is_named(tmp_path):
    def tried(code):
        return try_size([sys.executable, "-c", code], 8, 2, tmp_path)

    with pytest.raises(Failure, match=r"^the try of micro_batch_size=8 failed with exit status 3: the disk is gone$"):
        tried("import sys; print('error: the disk is gone\\nmore', file=sys.stderr); sys.exit(3)")
    with pytest.raises(Failure, match="exit status 1: ZeroDivisionError"):
        tried("1 / 0")
    with pytest.raises(InputError, match="^no such data$"):
        tried("import sys; print('error: no such data', file=sys.stderr); sys.exit(2)")
    with pytest.raises(InputError, match="^no such rows$"):  # torchrun's code is 1; a rank left a file in TMPDIR
        left = "from pathlib import Path; Path(os.environ['TMPDIR'], 'rejected.txt').touch()"
        tried(f"import os, sys; {left}; print('error: no such rows\\nmore', file=sys.stderr); sys.exit(1)")


def test_a_sweep_ends_below_the_memory(tmp_path, prepared, monkeypatch, capsys):
    """The first try is a process, which runs out of memory; the others are made up."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process

    def try_32(command, size, accumulation, work):
        if size == 32:
            return try_size(command, size, accumulation, work)
        speed = {"tokens_per_s": {"median": 100.0 - size}, "peak_device_bytes": None, "peak_process_bytes": 2**30}
        return Try(size, accumulation, "fits", speed)

    monkeypatch.setattr(sweep, "try_size", try_32)
    # A process takes 1.1 GiB, and what the backward pass needs of 32 sequences 1.5 GiB.
    wide = ["model.intermediate_size=80000", "max_memory_gib=2.2", "optim=lamb"]
    given = [*settings(prepared, *wide), "global_batch_size=32", "micro_batch_size=32", "steps=1"]
    given += [f"output={tmp_path / 'sweep.json'}", "--sweep"]
    assert bench.main(given) == cli.DONE
    result = json.loads((tmp_path / "sweep.json").read_text())
    verdicts = [(each["micro_batch_size"], each["verdict"]) for each in result["tries"]]
    assert verdicts == [(32, "does not fit: out of host memory"), (16, "fits")]
    assert (result["largest_micro_batch_size"], result["best_accumulation"]) == (16, 2)
    said = capsys.readouterr().out
    assert said.endswith("the fastest is micro_batch_size=16 with an accumulation of 2\n") and "does not fit" in said
