"""torch.compile: the same numbers as without, no graph more than the shapes need, and none compiled in silence.

TorchInductor takes many seconds for a graph on a CPU: where kernels are not what is shown, there are none (`traced`).
"""

import os
import shutil
from functools import partial

import pytest
import torch
from finetuning import tuned, two_lengths
from forks import DEVICE, launch, run_forked
from run_results import assert_same_run, losses
from running import ROOT, lines, run, train_config, train_overrides
from traced import without_kernels

from train import loop
from train.config import BackendConfig
from train.parallel import compiled, ddp
from train.run.command import DONE
from train.run.stopping import StopRequest

compiles = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler: apt-get install g++"
)
RECOMPUTED = ["backend.activation_checkpointing=true", "micro_batch_size=2"]
WIDE = "model.intermediate_size=8192"  # a layer of 2 MB: above DDP's first bucket, at which torch would cut graphs


def summary(run_dir):
    return lines(run_dir, "summary")[-1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, prepared):
    run_dir = tmp_path_factory.mktemp("runs") / "plain"
    loop.run(train_config(run_dir, prepared, "backend=ddp", WIDE), StopRequest())
    return run_dir


@pytest.mark.slow
def test_compiled_layers_train_as_plain_ones(plain, prepared, tmp_path):
    """Two ranks, accumulation, activation checkpointing; ALBERT's shared layer is compiled once for each mode."""
    settings = train_overrides(
        tmp_path / "run", prepared, "backend=ddp", "backend.compile=layers", *RECOMPUTED, WIDE
    )
    result = run(
        settings,
        ranks=2,
        module=str(ROOT / "tests" / "traced.py"),
        env={
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        },
    )
    assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "run", plain)
    assert summary(tmp_path / "run")["graphs"] == 3 and summary(tmp_path / "run")["compile_s"] > 0
    assert summary(plain).get("graphs", 0) == 0
    assert not lines(tmp_path / "run", "fault") and "graph" not in result.stderr


@pytest.mark.slow
def test_auto_compiles_what_repays_it_and_goes_on_without_where_the_first_graph_fails(
    plain, prepared, tmp_path
):
    """The devices on which it compiles by itself are GPUs; here the CPU stands for one."""

    def said(name):
        return (tmp_path / name / "log" / "rank_0000.txt").read_text()

    with pytest.MonkeyPatch.context() as patch:
        without_kernels(patch.setattr)
        patch.setattr(compiled, "DEVICES", (DEVICE,))
        patch.setattr(compiled, "compile_fault", str)
        for name, least, graphs in (("short", 7, 0), ("long", 6, 3)):
            patch.setattr(compiled, "LEAST_PASSES", least)
            loop.run(train_config(tmp_path / name, prepared, "backend=ddp", WIDE), StopRequest())
            assert_same_run(tmp_path / name, plain)
            assert summary(tmp_path / name)["graphs"] == graphs
            assert ("backend.compile=auto chose backend.compile=model" in said(name)) == bool(
                graphs
            )

        def fails(*_args, **_options):
            raise RuntimeError("no kernels today")

        patch.setattr(torch._dynamo, "lookup_backend", lambda _name: fails)
        in_bf16 = ["backend=ddp", WIDE, "backend.precision=bf16"]
        loop.run(
            train_config(tmp_path / "plain", prepared, *in_bf16, "backend.compile=none"),
            StopRequest(),
        )
        with pytest.MonkeyPatch.context() as on_gpu:  # where compiled norms return another dtype
            on_gpu.setattr(ddp.DDP, "narrows_norms", True)
            loop.run(train_config(tmp_path / "failed", prepared, *in_bf16), StopRequest())
        assert "nothing is compiled, because the first graph failed" in said("failed")
        assert "no kernels today" in said("failed")
        assert losses(tmp_path / "failed") == losses(tmp_path / "plain")
        loop_fails = partial(
            loop.run, train_config(tmp_path / "explicit", prepared, "backend.compile=model")
        )
        with pytest.raises(Exception, match="no kernels today"):
            loop_fails(StopRequest())
        patch.setattr(compiled, "compile_fault", lambda: "there is no Triton")
        loop.run(
            train_config(tmp_path / "no_triton", prepared, "backend=ddp", WIDE), StopRequest()
        )
        assert "because on 1 of 1 ranks there is no Triton" in said("no_triton") and losses(
            tmp_path / "no_triton"
        ) == losses(plain)


ONE_RANK_FAILS = f"""
import os, sys
from train.__main__ import main
import torch._dynamo
from train.parallel import compiled
eager = torch._dynamo.lookup_backend("aot_eager")
def build(graph, inputs):
    if os.environ["RANK"] == "1":
        raise RuntimeError("no kernels on this rank")
    return eager(graph, inputs)
torch._dynamo.lookup_backend = lambda _: build
compiled.DEVICES, compiled.compile_fault, compiled.LEAST_PASSES = ({DEVICE!r},), str, 1
sys.exit(main())
"""


@pytest.mark.slow
def test_where_the_first_graph_fails_on_one_rank_all_ranks_go_on_without(prepared, tmp_path):
    (tmp_path / "script.py").write_text(ONE_RANK_FAILS)
    for name, program, compile in (
        ("trial", str(tmp_path / "script.py"), "auto"),
        ("plain", "train", "none"),
    ):
        settings = train_overrides(
            tmp_path / name,
            prepared,
            "backend=ddp",
            WIDE,
            "max_steps=4",
            f"backend.compile={compile}",
        )
        done = run_forked(launch(program, settings, ranks=2), os.environ)
        assert done.returncode == DONE, done.stderr
    assert (
        losses(tmp_path / "trial") == losses(tmp_path / "plain")
        and summary(tmp_path / "trial")["graphs"] > 0
    )
    for rank in range(2):
        said = (tmp_path / "trial" / "log" / f"rank_{rank:04d}.txt").read_text()
        assert said.count("the first graph failed: RuntimeError: no kernels on this rank") == 1


@pytest.mark.slow
@compiles
def test_a_compiled_model_resumes_bit_for_bit_with_dropout(toy):
    """The masks of compiled dropout follow the run's random state."""
    options = {
        "backend": BackendConfig(device=DEVICE, precision="fp32", compile="model"),
        "eval_every": None,
    }
    toy.train("whole", **options)
    toy.stopped_at_once("cut", **options)
    assert toy.train("cut", **options) == ("done", 6)
    assert toy.values("train", "loss", "cut") == toy.values("train", "loss", "whole")
    assert (
        toy.weights(6, "cut") == toy.weights(6, "whole")
        and toy.lines("summary", "whole")[0]["graphs"] == 2
    )


@pytest.mark.slow
def test_a_classifier_of_several_lengths_has_a_graph_for_each_and_one_too_many_is_named(
    tokenizer_folder, tmp_path, monkeypatch
):
    without_kernels(monkeypatch.setattr)
    settings = [*two_lengths(tmp_path), "eval_every=null", "max_steps=8", "global_batch_size=1"]
    tuned(tmp_path / "plain", tokenizer_folder, *settings)
    expect = compiled.TorchCompiler.expect

    def expect_one_fewer(self, lengths):
        expect(self, lengths)
        self.budget.limit -= 1

    monkeypatch.setattr(compiled.TorchCompiler, "expect", expect_one_fewer)
    tuned(tmp_path / "run", tokenizer_folder, *settings, "backend.compile=model")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert summary(tmp_path / "run")["graphs"] == 4
    (warning,) = [
        line
        for line in (tmp_path / "run" / "log" / "rank_0000.txt").read_text().splitlines()
        if "graph" in line
    ]
    assert "graph 4 was compiled, but only 3 are expected" in warning
