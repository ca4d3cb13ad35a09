"""Backends, engines and settings that do not go together: one line, and no run."""

from __future__ import annotations

import pytest
from rejections import rejects
from running import train_here

FSDP = "parallel=fsdp"
DEEP = ["model=any", "model.architecture=bert", "model.embedding_size=null", "model.num_layers=8"]


def pipeline(stages, micro_batches, schedule):
    numbers = [f"parallel.stages={stages}", f"parallel.micro_batches={micro_batches}"]
    return [*DEEP, "parallel=pipeline", *numbers, f"parallel.schedule={schedule}"]


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, [FSDP, "backend=xla"], "parallel=fsdp does not work with backend=xla"),
        (
            1,
            [FSDP, "backend.precision=fp16"],
            "parallel=fsdp does not work with backend.precision=fp16",
        ),
        (1, [FSDP, "backend.grad_compression=bf16"], "parallel=fsdp reduces gradients itself"),
        (
            1,
            [FSDP, "backend.compile=layers"],
            "backend.compile=layers has not been tested with parallel=fsdp",
        ),
        (
            1,
            ["parallel=local_sgd"],
            "there is no such parallel; choose one of: data, fsdp, pipeline",
        ),
        (3, pipeline(2, 2, "1f1b"), "parallel.stages=2 does not divide the 3 ranks of this run"),
        (
            2,
            pipeline(2, 3, "1f1b"),
            "micro_batch_size=8 is not a multiple of parallel.micro_batches=3",
        ),
        (4, pipeline(4, 2, "gpipe"), "parallel.micro_batches=2 does not fit parallel.stages=4"),
        (
            2,
            pipeline(2, 5, "interleaved"),
            "parallel.micro_batches=5 does not fit parallel.stages=2",
        ),
        (
            8,
            pipeline(8, 8, "interleaved"),
            "splits the model into 16 parts, but it has only 8 layers",
        ),
        (2, pipeline(1, 4, "1f1b"), "parallel.stages=1 must be 2 or more"),
        (2, pipeline(2, 4, "zigzag"), "parallel.schedule=zigzag is not known"),
        (
            2,
            ["parallel=pipeline", "backend=xla"],
            "parallel=pipeline does not work with backend=xla",
        ),
        (
            2,
            ["parallel=pipeline", "backend.grad_compression=bf16"],
            "leave out backend.grad_compression",
        ),
        (2, ["parallel=pipeline", "backend.compile=model"], "set backend.compile=layers"),
        (
            2,
            ["parallel=pipeline", "backend.precision=fp16"],
            "does not work with backend.precision=fp16",
        ),
        (
            1,
            ["backend.grad_compression=half"],
            "grad_compression=half is not known; choose one of: none, bf16",
        ),
        (1, ["backend=xla", "backend.compile=layers"], "compile=layers is not for backend=xla"),
        (
            1,
            ["backend.activation_checkpointing=true", "backend.cuda_graphs=true"],
            "graphs=true does not work with",
        ),
        (
            1,
            ["backend.compile=layers", "backend.cuda_graphs=true"],
            "cuda_graphs=true needs a CUDA device",
        ),
        (
            1,
            ["backend.compile=all"],
            "backend.compile=all is not known; choose one of: auto, none, layers, model",
        ),
        (1, ["backend.compile=layers"], "there is no no-such-compiler here: apt-get install g++"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    prepared, tmp_path, monkeypatch, ranks, options, message
):
    launched = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    if ranks > 1:
        for name, value in launched.items():
            monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = rejects("", lambda: train_here(tmp_path / "run", prepared, *options))
    assert message in said
    assert not {path.name for path in (tmp_path / "run").rglob("*")} & {
        "metrics.jsonl",
        "checkpoints",
        "config.yaml",
    }
