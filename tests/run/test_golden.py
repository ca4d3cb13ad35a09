"""Runs whose every loss is recorded in tests/golden/runs/: a file is a configuration and what it gave.

On the kind of processor that recorded them the losses are equal bit for bit, elsewhere but for rounding. After a
change that is meant to change them, `GOLDEN=write python -m pytest tests/run/test_golden.py` writes the files again; a
commit that does so says which losses changed, and why.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning import squad, task_of
from running import SYLLABLES, TINY, lines, prepare_config, run, write_corpus
from saved_steps import step_folder, store_of

from train.data.shards.manifest import read_manifest
from train.storage.folders import LocalFolder
from train.tools import prepare

FOLDER = Path(__file__).parent.parent / "golden/runs"
DATA = FOLDER.parent / "data.json"
GOLDEN = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
# Processors with other vector instructions add in another order.
ELSEWHERE = {"loss": 1e-5, "grad_norm": 1e-3, "bf16": 2e-3}
WRITES = os.environ.get("GOLDEN") == "write"
COMMON = [
    *TINY,
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "data.num_workers=0",
    "global_batch_size=8",
    "max_steps=20",
    "log_every=1",
    "eval_every=10",
    "optim.lr=1e-3",
    "telemetry.trackers=[]",
    "watchdog.step_s=0",
    "samples=0",
    "export=false",
    "backend.device=cpu",
    "backend.precision=fp32",
]


def machine() -> str:
    """What decides the last bits of a sum: processor, vector instructions, versions."""
    pairs = (
        line.split(":", 1)
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    )
    facts = {key.strip(): value.strip() for key, value in pairs}
    processor = " ".join(
        facts.get(key, "")
        for key in ("model name", "cpu family", "model", "stepping", "cache size")
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor}, {capability}, torch {torch.__version__.partition('+')[0]}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, labelled rows of each task, and the tokenizer."""
    folder = tmp_path_factory.mktemp("golden")
    corpus = write_corpus(folder / "corpus.txt", num_documents=80, seed=3)
    prepare.prepare(prepare_config(folder / "shards", corpus, "seed=3"))
    texts = [line for line in corpus.read_text().splitlines() if line]
    for part, seed in {"train": 4, "dev": 5}.items():
        write_rows(folder, part, texts, random.Random(seed))
        (folder / f"{part}_qa.json").write_text(json.dumps(squad(texts, seed=seed, questions=40)))
    return folder


def write_rows(folder: Path, part: str, texts: list[str], rng: random.Random) -> None:
    """Write labelled rows whose targets follow from the text, so that there is something to learn."""
    rows = []
    sentences = []
    for _ in range(96):
        text = rng.choice(texts)
        words = text.split()
        rows.append(
            {
                "text": text,
                "label": SYLLABLES[len(words) % 3],
                "labels": [name for name in SYLLABLES[:3] if name in text],
                "score": len(text) / 10,
            }
        )
        tags = ["B-NAME" if word.startswith("b") else "O" for word in words]
        sentences.append("".join(f"{word} {tag}\n" for word, tag in zip(words, tags, strict=True)))
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{part}.jsonl").write_text(content)
    (folder / f"{part}.conll").write_text("\n".join(sentences))


def settings(golden: dict[str, Any], inputs: Path, run_dir: Path) -> list[str]:
    given = [each.replace("INPUTS", str(inputs)) for each in golden["settings"]]
    keys = {each.partition("=")[0] for each in given}
    common = [each for each in COMMON if each.partition("=")[0] not in keys]
    return [*common, f"run_dir={run_dir}", f"data.cache_dir={run_dir.parent / 'cache'}", *given]


def train(golden: dict[str, Any], inputs: Path, run_dir: Path) -> None:
    """Train in forks, as a user would. A run with `resumes_at` loses its later checkpoints, and is taken up again."""
    given = settings(golden, inputs, run_dir)
    finish(given, golden["ranks"])
    if "resumes_at" in golden:
        store = store_of(run_dir)
        for step in store.steps():
            if step > golden["resumes_at"]:
                shutil.rmtree(step_folder(run_dir, step))
        assert max(store.steps()) == golden["resumes_at"]
        finish(given, golden["ranks"])


def finish(given: list[str], ranks: int) -> None:
    done = run(given, ranks=ranks)
    assert done.returncode == 0, done.stderr


def numbers(run_dir: Path) -> dict[str, list[float]]:
    """The numbers of each step; of a step that was taken twice, those of the last time."""
    steps = {line["step"]: line for line in lines(run_dir, "train")}
    evaluations = {line["step"]: line for line in lines(run_dir, "eval")}
    return {
        "loss": [line["loss"] for line in steps.values()],
        "grad_norm": [line["grad_norm"] for line in steps.values()],
        "eval_loss": [line["loss"] for line in evaluations.values()],
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_losses_are_those_recorded(name: str, inputs: Path, tmp_path: Path):
    golden = GOLDEN[name]
    if "backend=xla" in golden["settings"]:
        pytest.importorskip("torch_xla")
    train(golden, inputs, tmp_path / "run")
    found = numbers(tmp_path / "run")
    if WRITES:
        content = {**golden, "machine": machine(), **found}
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        return
    assert len(found["loss"]) == len(golden["loss"]) == 20
    if golden["machine"] == machine():
        assert found == {key: golden[key] for key in found}
        return
    tolerance = (
        ELSEWHERE["bf16"] if "backend.precision=bf16" in golden["settings"] else ELSEWHERE["loss"]
    )
    for key, values in found.items():
        wider = ELSEWHERE["grad_norm"] / ELSEWHERE["loss"] if key == "grad_norm" else 1
        assert values == pytest.approx(golden[key], rel=tolerance * wider), key


def test_shards_and_tables_are_those_recorded(inputs: Path, tmp_path: Path):
    """The bytes of prepared shards, and what identifies the prepared rows of each task."""
    manifest = read_manifest(LocalFolder(inputs / "shards"))
    found = {
        "shards": {shard.file: shard.sha256 for shard in manifest.shards},
        "id": manifest.id,
        "tables": {},
    }
    for name, golden in GOLDEN.items():
        if "data=records" in golden["settings"]:
            found["tables"][name] = task_of(settings(golden, inputs, tmp_path / "run")).data_id
    if WRITES:
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(DATA.read_text())


@pytest.mark.parametrize("name", ["multilabel", "regress", "ner", "qa"])
def test_a_task_is_the_same_at_any_length_on_two_ranks_and_through_xla(
    name: str, inputs: Path, tmp_path: Path
):
    """Without dropout, whose draws belong to a rank and a shape."""
    still = ["model.hidden_dropout=0", "model.attention_dropout=0", "max_steps=4", "eval_every=4"]
    given = {"settings": [*GOLDEN[name]["settings"], *still], "ranks": 1}
    train(given, inputs, tmp_path / "one")
    others = {"two": {**given, "ranks": 2}}
    others["two"]["settings"] = [*given["settings"], "micro_batch_size=4"]
    for where, lengths in {"own": "[]", "one": "[32]"}.items():
        more = [f"data.lengths={lengths}", "micro_batch_size=2"]
        others[f"{where}_length"] = {**given, "settings": [*given["settings"], *more]}
    if name != "qa":
        pytest.importorskip("torch_xla")
        others["xla"] = {**given, "settings": [*given["settings"], "backend=xla"]}
    for where, other in others.items():
        train(other, inputs, tmp_path / where)
        for kind, values in numbers(tmp_path / "one").items():
            assert numbers(tmp_path / where)[kind] == pytest.approx(values, rel=1e-4), where
