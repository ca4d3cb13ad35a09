"""How tests make a small corpus, a preparation and a run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import DEVICE, TORCHRUN, free_port, launch, run_forked
from forks import ROOT as ROOT

from train.config import PrepareConfig, TrainConfig
from train.data.shards.manifest import DataManifest
from train.run import compose as cli
from train.run.stopping import StopRequest

SEQ_LEN = 32
TINY = [  # an ALBERT that learns in milliseconds
    "model=albert_tiny",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.embedding_size=16",
    "model.num_heads=2",
]
SYLLABLES = "ba be bo da du fi fo ga gu ka ki lo lu ma mi na ne no pa pe ra ri sa so ta ti to va we zu".split()


def write_corpus(path: Path, *, num_documents: int = 120, seed: int = 0) -> Path:
    """Sentences of made-up words, some far more frequent than others; documents parted by blank lines."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    documents = []
    for _ in range(num_documents):
        sentences = (
            " ".join(rng.choices(words, weights, k=rng.randint(4, 12))) + "."
            for _ in range(rng.randint(2, 12))
        )
        documents.append("\n".join(sentences))
    path.write_text("\n\n".join(documents))
    return path


def prepare_config(output: Path, corpus: Path, *overrides: str) -> PrepareConfig:
    usual = {  # by the key of an override that replaces it
        "corpus": "corpus=text",
        "corpus.path": f"corpus.path={corpus}",
        "tokenizer.pretrained": "tokenizer.vocab_size=120",
        "corpus.validation": "validation_fraction=0.25",
    }
    typed = {each.partition("=")[0] for each in overrides}
    given = [setting for key, setting in usual.items() if key not in typed]
    words = [f"output={output}", f"seq_len={SEQ_LEN}", *given, *overrides]
    return cli.load_config(PrepareConfig, words)


def prepare_here(output: Path, corpus: Path, *overrides: str) -> DataManifest | None:
    """Prepare in the tests' own process."""
    from train.tools import prepare  # late: conftest.py sets what torch and its neighbours read

    return prepare.prepare(prepare_config(output, corpus, *overrides))


def train_overrides(run_dir: Path, data: Path, *overrides: str) -> list[str]:
    """A run of a few seconds: a tiny ALBERT, six steps of eight sequences."""
    # a group is typed once
    is_other = any(override.startswith("model=") for override in overrides)
    return [
        *TINY[is_other:],
        f"run_dir={run_dir}",
        f"data.path={data}",
        "data.num_workers=0",
        "global_batch_size=8",
        "max_steps=6",
        "optim.lr=3e-3",
        "log_every=1",
        "eval_every=3",
        "checkpoint.every=3",
        "telemetry.trackers=[]",
        f"backend.device={DEVICE}",
        "backend.precision=fp32",
        *overrides,
    ]


def train_config(run_dir: Path, data: Path, *overrides: str) -> TrainConfig:
    """For a run in the tests' own process. Those of `run` and `command` have a watchdog as well."""
    return cli.load_config(
        TrainConfig, train_overrides(run_dir, data, "watchdog.step_s=0", *overrides)
    )


def run(
    arguments: list[str],
    *,
    ranks: int = 1,
    module: str = "train",
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`baretrain train ...`, alone or on several ranks of this machine under torchrun, in forks (see there)."""
    words = [module] if module.endswith(".py") else ["train", module]
    words += arguments
    if ranks > 1:
        words = launch(words[0], words[1:], ranks=ranks)
    return run_forked(words, {**os.environ, **(env or {})})


def command(arguments: list[str], *, ranks: int = 1, module: str = "train") -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "train", module, *arguments]
    launcher = [
        sys.executable,
        "-m",
        TORCHRUN,
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
    ]
    return [*launcher, "-m", "train", module, *arguments]


def train_here(run_dir: Path, data: Path, *overrides: str) -> tuple[str, int]:
    """The same run in the tests' own process."""
    from train import loop  # late: conftest.py sets what torch and its neighbours read

    return loop.run(train_config(run_dir, data, *overrides), StopRequest())


def outcome(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "outcome.json").read_text())
    return content


def lines(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl."""
    result = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in result if line["kind"] == kind]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def eventually(answer: Callable[[], Any], deadline_s: float = 180.0) -> Any:
    """The first answer that is true, waited for. Asking takes half of the time at most: others need the cores."""
    until_s = time.monotonic() + deadline_s
    while True:
        asked_s = time.monotonic()
        if value := answer():
            return value
        assert time.monotonic() < until_s, "nothing came"
        time.sleep(min(max(0.01, time.monotonic() - asked_s), 0.1))
