"""Compiling graphs before a run, with a stand-in for neuron_parallel_compile: nothing here ran on hardware."""

import json
import os
import sys

import pytest

from train.config import TrainConfig
from train.machine import neuron
from train.parallel.xla_environment import COLLECTS
from train.run import compose as cli
from train.tools import precompile

RUN = "torchrun --nproc-per-node=32 -m train experiment=albert_pretrain instance=trn1.32xlarge".split()
STAND_IN = """#!{python}
import json, os, sys
call = {{"words": sys.argv[1:], "environment": dict(os.environ)}}
open("call.json", "w").write(json.dumps(call))
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The stand-in on PATH; returns a function that reads what it was called with."""
    for name in [*os.environ]:
        if name.startswith("NEURON"):
            monkeypatch.delenv(name)
    script = tmp_path / precompile.TOOL
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.setattr(neuron, "NETWORK_FILESYSTEMS", ("nfs",))
    monkeypatch.chdir(tmp_path)
    return lambda: json.loads((tmp_path / "call.json").read_text())


@pytest.mark.parametrize("experiment", ["albert_pretrain", "mnli_roberta_large", "demo"])
def test_the_short_run_is_the_same_run_but_for_its_length(experiment):
    real = cli.load_config(TrainConfig, [f"experiment={experiment}"])
    given = ["max_steps=900", "max_epochs=0.1", "optim.warmup_steps=800", "early_stop.patience=1"]
    words = [f"experiment={experiment}", *given, "run_dir=x", *precompile.SHORT]
    short = cli.load_config(TrainConfig, words)
    for section in ("seed", "seq_len", "task", "model", "backend", "parallel"):
        assert getattr(short, section) == getattr(real, section), section
    assert (short.optim.name, short.global_batch_size) == (real.optim.name, real.global_batch_size)
    assert short.max_steps == 16 and not short.export and short.eval_every is None


def test_the_tool_gets_the_command_of_the_run_and_flags_of_the_user_are_kept(tool, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type generic -O1")
    assert precompile.main(RUN) == cli.DONE
    call = tool()
    assert call["words"][: len(RUN)] == RUN
    assert call["words"][len(RUN)].startswith("run_dir=")
    assert tuple(call["words"][len(RUN) + 1 :]) == precompile.SHORT
    flags = call["environment"]["NEURON_CC_FLAGS"]
    assert flags.startswith("--model-type generic -O1 ") and "--retry_failed" in flags
    assert flags.count("--model-type") == 1
    assert call["environment"][COLLECTS] == "1"


def test_a_tool_that_fails_is_a_failure_and_a_dry_run_starts_nothing(tool, monkeypatch, capsys):
    assert precompile.main(["--dry-run", *RUN]) == cli.DONE
    with pytest.raises(FileNotFoundError):
        tool()
    assert "neuron_parallel_compile torchrun --nproc-per-node=32" in capsys.readouterr().out
    monkeypatch.setenv("STATUS", "2")
    assert precompile.main(RUN) == cli.FAILED
    assert "ended with exit code 2" in capsys.readouterr().err
