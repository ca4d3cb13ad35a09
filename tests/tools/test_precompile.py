"""Filling Neuron's compile cache, with a stand-in for neuron_parallel_compile: nothing here ran on hardware.

The results in recorded/precompile have the shape that Neuron's documentation shows and its source writes.
"""

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from running import ROOT, train_overrides

from train.config import TrainConfig, make_plan
from train.machine import host
from train.machine.versions import read_versions
from train.run import compose as cli
from train.tools import precompile

RECORDED = Path(__file__).parent.parent / "recorded" / "precompile"
FAILED = "MODULE_9219523464496887986+abb26765"  # in one_failed.json
COLLECT = "train.tools.collect_graphs"
RUN = ["experiment=albert_pretrain", "backend=xla", "instance=trn1.32xlarge"]


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The stand-in on PATH, in a fresh folder, with a local cache; returns the folder that directs it."""
    for name in [*os.environ]:
        if name.startswith(("NEURON", "SLURM")):
            monkeypatch.delenv(name)
    for name in ("bin", "tool", "tmp", "cache"):
        (tmp_path / name).mkdir()
    script = RECORDED / "neuron_parallel_compile.py"
    executable(
        tmp_path / "bin/neuron_parallel_compile",
        f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TOOL", str(tmp_path / "tool"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tool"


def calls(tool):
    """What the stand-in was called with, one dictionary a call."""
    path = tool / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def results(tool, name):
    (tool / "0.json").write_bytes((RECORDED / f"{name}.json").read_bytes())


def cached(tmp_path, name, module="MODULE_1+2"):
    """A graph in the local cache with one file beside it."""
    folder = tmp_path / "cache/neuronxcc-2.26.6360.0+0" / module
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return folder / "model.hlo_module.pb"


@pytest.mark.parametrize("experiment", ["albert_pretrain", "mnli_roberta_large", "demo"])
def test_the_short_run_is_the_same_run_but_for_its_length(experiment):
    real = cli.load_config(TrainConfig, [f"experiment={experiment}"])
    given = ["max_steps=900", "max_epochs=0.1", "optim.warmup_steps=800", "early_stop.patience=1"]
    short = cli.load_config(
        TrainConfig, [f"experiment={experiment}", *given, *precompile.short_run(Path("/tmp/a b"))]
    )
    for section in ("seed", "seq_len", "task", "model", "backend", "parallel"):
        assert getattr(short, section) == getattr(real, section), section
    assert short.optim.name == real.optim.name
    ours, theirs = (
        make_plan(cfg, world_size=16, rows=10**9, seq_len=512) for cfg in (short, real)
    )
    assert (ours.micro_batch_size, ours.accumulation) == (
        theirs.micro_batch_size,
        theirs.accumulation,
    )
    assert ours.total_steps == precompile.STEPS
    assert short.run_dir == "/tmp/a b"
    assert (
        short.max_examples
        is short.max_epochs
        is short.eval_every
        is short.early_stop.patience
        is None
    )
    assert not (short.export or short.tensorboard)


def test_batches_of_several_lengths_take_more_steps_and_some_steps_log(tool):
    given = [
        "experiment=mnli_roberta_large",
        "hub.push_to=a/b",
        "instance=trn1.2xlarge",
        "backend=xla",
        "--dry-run",
    ]
    short_run = precompile.build_short_run(
        precompile.parse([*given, "global_batch_size=32"]), {}, work=tool
    )
    assert (
        f"max_steps={4 * precompile.STEPS}" in short_run.command
        and "hub.push_to=null" in short_run.command
    )
    # between the first and the last
    logs = {step % precompile.LOG_EVERY == 0 for step in range(2, precompile.STEPS)}
    assert logs == {True, False}


def test_the_tool_gets_torchrun_with_the_ranks_of_the_instance_and_a_folder_of_its_own(tool):
    results(tool, "compiled_again")
    assert precompile.main(RUN) == cli.DONE
    (call,) = calls(tool)
    env, chdir, python, *rest = call["run"]
    assert (env, chdir, python) == ("env", f"--chdir={tool.parent}", sys.executable)
    assert rest[: rest.index(COLLECT)] == [
        "-m",
        "train.machine.local_torchrun",
        "--nproc-per-node=32",
        "-m",
    ]
    assert rest[rest.index(COLLECT) + 1 :][:3] == RUN
    assert f"max_steps={precompile.STEPS}" in rest
    assert Path(call["cwd"]).parent == tool.parent / "tmp"
    assert not list((tool.parent / "tmp").iterdir()) and not list(tool.parent.glob("*.json"))


def test_flags_of_the_user_are_appended_to(tool, monkeypatch, capfd):
    results(tool, "compiled_again")
    monkeypatch.setenv(
        "NEURON_CC_FLAGS", "--cache_dir='s3://bucket/my cache' --model-type generic -O1"
    )
    monkeypatch.setenv("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "7")
    assert precompile.main(RUN) == cli.DONE
    env = calls(tool)[0]["env"]
    theirs, ours = env["NEURON_CC_FLAGS"].split(" -O1 ")
    assert theirs == "--cache_dir='s3://bucket/my cache' --model-type generic"
    assert "--retry_failed_compilation" in ours and "--model-type" not in ours
    assert (
        env["NEURON_PARALLEL_COMPILE_MAX_RETRIES"] == "7"
        and env["NEURON_PARALLEL_COMPILE_DUMP_RESULTS"] == "1"
    )
    out = capfd.readouterr().out
    assert (
        f"NEURON_CC_FLAGS={shlex.quote(env['NEURON_CC_FLAGS'])}" in out
        and "cache: s3://bucket/my cache" in out
    )


@pytest.mark.parametrize(
    ("set_up", "said"),
    [
        (
            {"NEURON_CC_FLAGS": "--cache_dir=/shared/home/me/cache"},
            "/shared/home/me/cache is on nfs4",
        ),
        ({"PATH": "/usr/bin:/bin"}, read_versions().sdk.install),
        ({"LOCAL_RANK": "0"}, "without torchrun"),
    ],
    ids=["a cache on NFS", "without Neuron's packages", "under torchrun"],
)
def test_what_cannot_work_is_rejected_before_anything_runs(tool, monkeypatch, capfd, set_up, said):
    monkeypatch.setattr(host, "MOUNTINFO", RECORDED / "mountinfo_nfs.txt")
    for name, value in set_up.items():
        monkeypatch.setenv(name, value)
    assert precompile.main(RUN) == cli.REJECTED
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line and not calls(tool)


def test_a_graph_that_failed_is_named(tool, capfd):
    results(tool, "one_failed")
    assert precompile.main(RUN) == cli.FAILED
    err = capfd.readouterr().err
    assert "1 of 3 graphs failed" in err and err.count("MODULE_") == 1 and FAILED in err
    assert list(Path(err.split()[-1]).glob("*_results_*.json"))  # kept to look into


def test_a_short_run_that_fails_is_not_taken_for_a_failed_graph(tool, capfd):
    (tool / "status").write_text("1")
    results(tool, "one_failed")
    assert precompile.main(RUN) == cli.FAILED
    assert "the short run failed" in capfd.readouterr().err


def test_a_graph_that_the_cache_holds_compiled_did_not_fail(tool, tmp_path):
    graph = cached(tmp_path, "model.done")
    report = {str(graph): {"status": False, "retry": 0}}
    (tool / "0.json").write_text(
        json.dumps({"compilation_summary": {"false": 1}, "compilation_report": report})
    )
    assert precompile.main(RUN) == cli.DONE


def test_no_results_mean_all_cached_or_nothing_collected_and_those_of_another_shape_are_passed_over(
    tool, tmp_path, capfd
):
    for name, code, words in (
        ("log", cli.FAILED, "no graph was collected"),
        ("done", cli.DONE, "no new graph"),
    ):
        cached(tmp_path, f"model.{name}")
        assert precompile.main(RUN) == code
        assert words in "".join(capfd.readouterr())
    (tool / "2.json").write_text(
        '{"compilation_summary": {}, "compilation_report": {"graph": true}}'
    )
    assert precompile.main(RUN) == cli.DONE
    assert "does not have the format of neuron_parallel_compile" in capfd.readouterr().out


def test_locks_are_named(tool, tmp_path, capfd):
    results(tool, "compiled_again")
    cached(tmp_path, "model.hlo_module.pb.lock")
    assert precompile.main(RUN) == cli.DONE
    assert "holds 1 locks" in capfd.readouterr().out


def test_under_slurm_the_job_says_which_machine_this_is(tool, monkeypatch, capfd):
    bin_folder = tool.parent / "bin"
    executable(
        bin_folder / "scontrol",
        '#!/bin/sh\n[ "$*" = "show hostnames node-[3-4]" ] && printf "node-3\\nnode-4\\n"\n',
    )
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[3-4]")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert precompile.main([*RUN, "--dry-run"]) == cli.DONE
    assert "--nnodes=2 --node-rank=1 --master-addr=node-3" in capfd.readouterr().out
    given = ["--nnodes=4", "--node-rank=0", "--master-addr=other", "--master-port=1234"]
    assert precompile.main([*RUN, "--dry-run", *given]) == cli.DONE
    assert shlex.join(given) in capfd.readouterr().out
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert precompile.main([*RUN, "--dry-run"]) == cli.REJECTED
    assert "--ntasks-per-node=1" in capfd.readouterr().err


def test_the_short_run_is_a_run_in_the_users_folder(tool, monkeypatch, prepared):
    """The command as a whole, on the CPU: torchrun, the settings, a relative path, and a run that ends well."""
    results(tool, "compiled_again")
    (tool / "run").touch()
    (tool.parent / "data").symlink_to(prepared)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    overrides = train_overrides(
        Path("runs/real"), Path("data"), "checkpoint.every=2", "optim.warmup_steps=6"
    )
    assert precompile.main([*overrides, "--nproc-per-node=2"]) == cli.DONE
    assert not (tool.parent / "runs").exists()
