"""Filling Neuron's compile cache, with a stand-in for neuron_parallel_compile: nothing here ran on hardware.

The results in recorded/precompile have the shape that Neuron's documentation shows and its source writes.
"""

import functools
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from running import ROOT, train_overrides

from train import precompile
from train.cli import compose as cli
from train.config import TrainConfig, make_plan
from train.host import machine
from train.host.versions import read_versions

RECORDED = Path(__file__).parent / "recorded" / "precompile"
FAILED = "MODULE_9219523464496887986+abb26765"  # in one_failed.json
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
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
    executable(tmp_path / "bin/neuron_parallel_compile", f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
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


def results(tool, *names):
    for number, name in enumerate(names):
        (tool / f"{number}.json").write_bytes((RECORDED / f"{name}.json").read_bytes())


def cached(tmp_path, name, module="MODULE_1+2"):
    """A graph in the local cache with one file beside it."""
    folder = tmp_path / "cache/neuronxcc-2.26.6360.0+0" / module
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return folder / "model.hlo_module.pb"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_short_run_is_the_same_run_but_for_its_length(experiment):
    real = cli.load_config(TrainConfig, [f"experiment={experiment}"])
    given = ["max_steps=900", "max_epochs=0.1", "optim.warmup_steps=800", "early_stop.patience=1"]
    short = cli.load_config(TrainConfig, [f"experiment={experiment}", *given, *precompile.short_run(Path("/tmp/a b"))])
    for section in ("seed", "seq_len", "task", "model", "backend", "parallel"):
        assert getattr(short, section) == getattr(real, section), section
    assert short.optim.name == real.optim.name
    ours, theirs = (make_plan(cfg, world_size=16, rows=10**9, seq_len=512) for cfg in (short, real))
    assert (ours.micro_batch_size, ours.accumulation) == (theirs.micro_batch_size, theirs.accumulation)
    assert ours.total_steps == precompile.STEPS
    assert short.collect_graphs and short.run_dir == "/tmp/a b"
    assert short.max_examples is short.max_epochs is short.eval_every is short.early_stop.patience is None
    assert not (short.export or short.tensorboard)


def test_batches_of_several_lengths_take_more_steps(tool):
    given = ["experiment=mnli_roberta_large", "hub.push_to=a/b", "instance=trn1.2xlarge", "backend=xla", "--dry-run"]
    short_run = precompile.build_short_run(precompile.parse([*given, "global_batch_size=32"]), {}, work=tool)
    assert f"max_steps={4 * precompile.STEPS}" in short_run.command and "hub.push_to=null" in short_run.command


def test_a_short_run_meets_a_step_that_logs_and_one_that_does_not():
    logs = {step % precompile.LOG_EVERY == 0 for step in range(2, precompile.STEPS)}  # between the first and the last
    assert logs == {True, False}


def test_the_tool_gets_torchrun_with_the_ranks_of_the_instance_and_a_folder_of_its_own(tool):
    results(tool, "compiled_again")
    assert precompile.main(RUN) == cli.DONE
    (call,) = calls(tool)
    assert call["command"] == "collect-and-compile"
    env, chdir, python, *rest = call["run"]
    assert (env, chdir, python) == ("env", f"--chdir={tool.parent}", sys.executable)
    assert rest[: rest.index("train")] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=32", "-m"]
    assert rest[rest.index("train") + 1 :][:3] == RUN
    assert "collect_graphs=true" in rest and f"max_steps={precompile.STEPS}" in rest
    assert Path(call["cwd"]).parent.parent == tool.parent / "tmp"
    assert not list((tool.parent / "tmp").iterdir()) and not list(tool.parent.glob("*.json"))


def test_flags_of_the_user_are_appended_to(tool, monkeypatch, capfd):
    results(tool, "compiled_again")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir='s3://bucket/my cache' --model-type generic -O1")
    monkeypatch.setenv("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "7")
    assert precompile.main(RUN) == cli.DONE
    env = calls(tool)[0]["env"]
    theirs, ours = env["NEURON_CC_FLAGS"].split(" -O1 ")
    assert theirs == "--cache_dir='s3://bucket/my cache' --model-type generic"
    assert "--retry_failed_compilation" in ours and "--model-type" not in ours
    assert env["NEURON_PARALLEL_COMPILE_MAX_RETRIES"] == "7" and env["NEURON_PARALLEL_COMPILE_DUMP_RESULTS"] == "1"
    out = capfd.readouterr().out
    assert f"NEURON_CC_FLAGS={shlex.quote(env['NEURON_CC_FLAGS'])}" in out and "cache: s3://bucket/my cache" in out


@pytest.mark.parametrize(("instance", "retries"), [("trn1.2xlarge", "1"), ("trn1.32xlarge", "2")])
def test_a_small_host_retries_once(instance, retries):
    assert precompile.environment({}, instance=instance)["NEURON_PARALLEL_COMPILE_MAX_RETRIES"] == retries


def test_a_cache_on_nfs_is_rejected_before_anything_runs(tool, monkeypatch, capfd):
    mountinfo = RECORDED / "mountinfo_nfs.txt"
    monkeypatch.setattr(machine, "filesystem", functools.partial(machine.filesystem, mountinfo=mountinfo))
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=/shared/home/me/cache")
    assert precompile.main(RUN) == cli.REJECTED
    assert not calls(tool)
    (line,) = capfd.readouterr().err.splitlines()
    assert "/shared/home/me/cache is on nfs4" in line


@pytest.mark.parametrize("missing", [True, False], ids=["without Neuron's packages", "under torchrun"])
def test_it_says_how_it_is_to_be_started(tool, monkeypatch, capfd, missing):
    if missing:
        (tool.parent / "bin/neuron_parallel_compile").unlink()
    else:
        monkeypatch.setenv("LOCAL_RANK", "0")
    assert precompile.main(RUN) == cli.REJECTED
    (line,) = capfd.readouterr().err.splitlines()
    assert (read_versions().sdk.install if missing else "without torchrun") in line and not calls(tool)


def test_a_dry_run_prints_the_command_and_runs_nothing(tool, capfd):
    (tool.parent / "bin/neuron_parallel_compile").unlink()  # not needed either
    assert precompile.main(["--dry-run", *RUN, "--nnodes=2", "--node-rank=1", "--master-addr=head"]) == cli.DONE
    out = capfd.readouterr().out
    assert "--nnodes=2 --node-rank=1 --master-addr=head --master-port=29500 --nproc-per-node=32" in out
    assert "NEURON_CC_FLAGS=" in out and "world size 64" in out
    assert not calls(tool) and not list((tool.parent / "tmp").iterdir())


def test_failed_graphs_are_compiled_again(tool, capfd):
    results(tool, "one_failed", "compiled_again")
    assert precompile.main(RUN) == cli.DONE
    assert [call["command"] for call in calls(tool)] == ["collect-and-compile", "compile"]
    out = capfd.readouterr().out
    assert "1 of 3 graphs failed; round 1 of 1" in out and "3 graphs compiled" in out  # another run's graph not counted


@pytest.mark.parametrize(
    ("rounds", "later"), [(0, []), (1, ["one_failed"]), (2, ["one_failed", "one_failed"]), (1, [])]
)
def test_what_fails_for_good_is_named(tool, capfd, rounds, later):
    """The last case: the second round has no results, as if the tool passed over what it knows to have failed."""
    results(tool, "one_failed", *later)
    assert precompile.main([*RUN, f"--retries={rounds}"]) == cli.FAILED
    assert [call["command"] for call in calls(tool)] == ["collect-and-compile", *["compile"] * rounds]
    err = capfd.readouterr().err
    assert "1 of 3 graphs failed" in err and err.count("MODULE_") == 1 and FAILED in err
    assert (tool.parent / "tmp" / err.split()[-1] / "attempt_0").is_dir()  # kept to look into


def test_a_graph_that_the_cache_holds_compiled_did_not_fail(tool, tmp_path):
    graph = cached(tmp_path, "model.done")
    report = {str(graph): {"status": False, "retry": 0}}
    (tool / "0.json").write_text(json.dumps({"compilation_summary": {"false": 1}, "compilation_report": report}))
    assert precompile.main(RUN) == cli.DONE
    assert len(calls(tool)) == 1


def test_a_short_run_that_fails_is_not_taken_for_a_failed_graph(tool, capfd):
    (tool / "status").write_text("1")
    results(tool, "one_failed")
    assert precompile.main(RUN) == cli.FAILED
    assert len(calls(tool)) == 1 and "the short run failed" in capfd.readouterr().err


def test_no_results_mean_all_cached_or_nothing_collected(tool, tmp_path, capfd):
    for name, code, words in (("log", cli.FAILED, "no graph was collected"), ("done", cli.DONE, "no new graph")):
        cached(tmp_path, f"model.{name}")
        assert precompile.main(RUN) == code
        assert words in "".join(capfd.readouterr())


def test_results_of_another_shape_are_passed_over_aloud(tool, tmp_path, capfd):
    cached(tmp_path, "model.done")
    (tool / "0.json").write_text('{"compilation_summary": {}, "compilation_report": {"graph": true}}')
    assert precompile.main(RUN) == cli.DONE
    assert "is not as neuron_parallel_compile wrote it" in capfd.readouterr().out


def test_locks_are_named_and_cleared_first_when_asked(tool, tmp_path, capfd):
    results(tool, "compiled_again", "compiled_again")
    cached(tmp_path, "model.hlo_module.pb.lock")
    assert precompile.main(RUN) == cli.DONE
    assert "holds 1 locks" in capfd.readouterr().out
    assert precompile.main([*RUN, "--clear-locks"]) == cli.DONE
    assert [call["command"] for call in calls(tool)] == ["collect-and-compile", "clear-locks", "collect-and-compile"]


def test_under_slurm_the_job_says_which_machine_this_is(tool, monkeypatch, capfd):
    bin_folder = tool.parent / "bin"
    executable(
        bin_folder / "scontrol", '#!/bin/sh\n[ "$*" = "show hostnames node-[3-4]" ] && printf "node-3\\nnode-4\\n"\n'
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
    overrides = train_overrides(Path("runs/real"), Path("data"), "checkpoint.every=2", "optim.warmup_steps=6")
    assert precompile.main([*overrides, "--nproc-per-node=2"]) == cli.DONE
    assert not (tool.parent / "runs").exists()
