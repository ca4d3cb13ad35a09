"""Our training and the Hugging Face Trainer at their fastest settings, on one GPU in eight minutes, as one table.

    benchmarks/gpu.sh speed [--output gpu.json] [--budget-s 460] [--only NAME ...] [--rows tweets.csv] [--tiny]

Candidates: "ours" is `baretrain bench`, which measures our loop and loader, with the `backend.compile` that a run
of 100,000 steps would choose; "ours native" is the same with backend.compile=none, for questions, and "ours
compiled" with backend.compile=layers, for classes. "trainer" is the Trainer with its defaults in bf16. "trainer best"
adds torch.compile, TF32, 4 workers and, where lengths vary, batches of similar lengths. "bound" is a bare compiled
loop, from benchmarks/peers/bare_encoder.py. All have random weights, random tokens and, except for fine-tuning, no
dropout. Questions fill their sequences, and the Trainer gets them with the masks and types that tokenizers return.
"GiB reserved" is the peak of what PyTorch's allocator took from the device, on all sides.

Each candidate is a forked process, so that a failure or a hang costs only its row. First, several candidates that
compile fill a common cache at the same time; then each candidate is timed alone. Rows that were never measured come
first; those for which no time is left need another call, with --only. The JSON file is written after each row. --rows
names a CSV file with a column "text", whose lengths the rows of tweets then have. --tiny tests this script with small
models on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import QUIET, Job, Result, hide_torch_xla, table

hide_torch_xla()
# any other query would bar forked processes from the GPU
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import transformers

from benchmarks.peers.bare_encoder import BareEncoder, bare_step

SKIPPED, TIMED = 20, 40  # steps of a candidate; the skipped ones compile and fill caches
SKIPPED_LENGTHS = 100  # skipped steps if lengths vary: each of about 16 lengths needs four
# Steps of the simulated runs, for backend.compile=auto; fine-tuning is that of MNLI, 3 epochs.
LONG_RUN = 100_000
FINE_TUNING = 36_000
TOGETHER = 8  # candidates that compile at the same time, before the first is timed; the others compile on their own
COMPILING_SHARE = 1 / 3  # maximum share of the budget for compiling
LEAST_S = 15  # seconds that must be left to start a candidate
MOST_S = 90  # seconds that a candidate may take
MASKED = 0.15  # share of the tokens to predict
GIB = 2**30
# Words per text: log-normal mean and deviation, minimum, maximum. Each word is one token. Those of tweets are the
# tokens that MiniLM's tokenizer finds in 15,463 tweets: 23.4 on average, 11 to 33 for nine tenths of them.
WORDS_OF_TEXT = (3.4, 0.5, 8, 128)  # as in MNLI
WORDS_OF_TWEET = (3.1, 0.32, 3, 49)
# About one token: with runs of at most 6 characters, those tweets have 22.8 on average.
TOKEN = re.compile(r"\w{1,6}|[^\w\s]")
ROWS = 4096  # texts to fine-tune on
QUESTIONS = 2048


@dataclass(frozen=True)
class Work:
    """A model, a batch, and a task."""

    name: str
    architecture: str
    hidden: int
    layers: int
    batch: int
    seq_len: int
    vocab_size: int = 30522
    embedding: int | None = None  # width of ALBERT's embeddings
    # classify texts of varying length, instead of predicting masked tokens
    classifies: bool = False
    words: tuple[float, float, int, int] = WORDS_OF_TEXT
    # answer questions from contexts, as in SQuAD
    answers: bool = False

    @property
    def candidates(self) -> list[str]:
        """The names of the candidates that this work compares."""
        names = ["ours", "trainer", "trainer best"]
        if self.answers:
            return [*names, "ours native"]
        if self.classifies:
            return [*names, "ours compiled"]
        return [*names, "bound"]

    def sizes(self, layers: str, heads: str) -> dict[str, int]:
        """Return the model's sizes by name. `layers` and `heads` name the numbers of layers and heads."""
        sizes = {
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "vocab_size": self.vocab_size,
        }
        sizes |= {layers: self.layers, heads: max(1, self.hidden // 64)}
        return sizes | ({"embedding_size": self.embedding} if self.embedding else {})

    def settings(self, folder: Path) -> list[str]:
        """Return the settings of our run on the data in `folder`."""
        words = [
            "model=any",
            f"model.architecture={self.architecture}",
            f"global_batch_size={self.batch}",
        ]
        words += [
            f"model.{name}={value}"
            for name, value in self.sizes("num_layers", "num_heads").items()
        ]
        words.append("model.max_positions=512")
        if self.answers:
            data = [
                "data=records",
                f"data.path={folder / 'questions.json'}",
                f"data.cache_dir={folder / 'cache'}",
            ]
            return [
                *words,
                *data,
                "task=qa",
                "optim=finetune",
                f"seq_len={self.seq_len}",
                f"task.stride={self.seq_len // 3}",
                f"model.tokenizer={folder / 'tokenizer'}",
            ]
        if self.classifies:
            data = [
                "data=csv",
                f"data.path={folder / 'texts.csv'}",
                f"data.cache_dir={folder / 'cache'}",
            ]
            return [
                *words,
                *data,
                "task=classify",
                "optim=finetune",
                f"model.tokenizer={folder / 'tokenizer'}",
            ]
        return [
            *words,
            f"data.path={folder / 'data'}",
            "model.hidden_dropout=0",
            "model.attention_dropout=0",
        ]

    def transformers_config(self) -> Any:
        sizes = self.sizes("num_hidden_layers", "num_attention_heads")
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if self.classifies or self.answers:
            still = {}
        return transformers.AutoConfig.for_model(self.architecture, **sizes, **still)


ALBERT = Work(
    "ALBERT-base 128 x 128", "albert", 768, 12, 128, 128, vocab_size=30000, embedding=128
)
LARGE = Work("BERT-large 64 x 512", "bert", 1024, 24, 64, 512)
BASE = Work("BERT-base 128 x 128", "bert", 768, 12, 128, 128)
TEXTS = replace(
    BASE, name="BERT-base, classes of texts, 32", batch=32, seq_len=512, classifies=True
)
TWEETS = replace(
    TEXTS, name="MiniLM, classes of tweets, 32", hidden=384, layers=6, words=WORDS_OF_TWEET
)
WORKS = [
    BASE,
    ALBERT,
    LARGE,
    TWEETS,
    replace(BASE, name="BERT-base, questions, 32 x 384", batch=32, seq_len=384, answers=True),
    TEXTS,
    replace(ALBERT, name="ALBERT-base 32 x 512", batch=32, seq_len=512),
    replace(LARGE, name="BERT-large 128 x 128", batch=128, seq_len=128),
]
# Rows that were measured (benchmarks/README.md) come last, except our own, whose code changes.
MEASURED = {(work.name, name) for work in (BASE, ALBERT) for name in ("trainer", "trainer best")}
MEASURED |= {(ALBERT.name, "bound")}


def tiny(work: Work) -> Work:
    small = replace(work, hidden=64, layers=2, batch=2, seq_len=32, vocab_size=500)
    return replace(small, embedding=16 if work.embedding else None)


# ---- data ----------------------------------------------------------------------------------------------------------


def make_data(work: Work, folder: Path, rows: Path | None) -> Result:
    """Write the data for `work`: prepared shards, or texts and a tokenizer with the same vocabulary.

    `rows`: a CSV file whose texts are as long as tweets are.
    """
    folder.mkdir()
    if not work.classifies and not work.answers:
        from benchmarks.pretraining import Shape, synthetic_data

        synthetic_data(folder, Shape("", work.vocab_size, work.seq_len, work.batch))
        return {}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text(
        "\n".join([*special, *(f"w{n}" for n in range(work.vocab_size - len(special)))])
    )
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    if work.answers:
        write_questions(folder / "questions.json", work, rng, len(special))
        return {}
    texts = (
        " ".join(f"w{n}" for n in rng.integers(0, work.vocab_size - len(special), length))
        for length in text_lengths(work, rng, rows)
    )
    lines = [f"{text},{number % 3}\n" for number, text in enumerate(texts)]
    (folder / "texts.csv").write_text("text,label\n" + "".join(lines))
    return {}


def text_lengths(work: Work, rng: np.random.Generator, rows: Path | None) -> np.ndarray:
    """Return the number of words of each text that `work` classifies."""
    mean, deviation, least, most = work.words
    lengths = rng.lognormal(mean, deviation, ROWS).clip(least, most)
    if rows and work.words == WORDS_OF_TWEET:
        with rows.open(newline="") as file:
            texts = [row["text"] for row in csv.DictReader(file)]
        lengths = np.array([len(TOKEN.findall(text)) for text in texts[:ROWS]])
    return lengths.clip(1, work.seq_len - 2).astype(int)


def write_questions(path: Path, work: Work, rng: np.random.Generator, special: int) -> None:
    """Write questions of random words in SQuAD's form. A question and its context fill the sequence."""
    length, asked = work.seq_len - 3, work.seq_len // 8
    paragraphs = []
    for number in range(QUESTIONS):
        words = [f"w{n}" for n in rng.integers(0, work.vocab_size - special, length)]
        context = words[asked:]
        answer = {"text": context[5], "answer_start": len(" ".join(context[:5])) + 1}
        question = {
            "id": str(number),
            "question": " ".join(words[:asked]),
            "answers": [answer],
        }
        paragraphs.append({"context": " ".join(context), "qas": [question]})
    document = {"version": "1.1", "data": [{"title": "random", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(document))


def masked_rows(work: Work, count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens in the Trainer's form: labels at the masked positions, -100 elsewhere."""
    torch.manual_seed(0)
    ids = torch.randint(5, work.vocab_size, (count, work.seq_len))
    labels = torch.where(torch.rand(ids.shape) < MASKED, ids, -100)
    return [{"input_ids": row, "labels": wanted} for row, wanted in zip(ids, labels, strict=True)]


def answered_rows(work: Work, count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens in the Trainer's form, as long as those of `write_questions`."""
    torch.manual_seed(0)
    ids = torch.randint(5, work.vocab_size, (count, work.seq_len))
    mask = torch.ones_like(ids[0])
    types = mask.clone()
    asked = work.seq_len // 8 + 2  # the question between its special tokens
    types[:asked] = 0
    place = torch.tensor(asked + 5)
    same = {"attention_mask": mask, "token_type_ids": types}
    same |= {"start_positions": place, "end_positions": place}
    return [{"input_ids": row, **same} for row in ids]


def labelled_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of texts.csv as tokens, for a collator that pads each batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder / "tokenizer", trust_remote_code=False
    )
    rows = [line.rsplit(",", 1) for line in (folder / "texts.csv").read_text().splitlines()[1:]]
    encoded = tokenizer([text for text, _ in rows])
    columns = zip(encoded["input_ids"], encoded["attention_mask"], rows, strict=True)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": int(row[1])}
        for ids, mask, row in columns
    ]


# ---- candidates: functions of a Run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The input of a candidate's measurement."""

    work: Work
    folder: Path
    device: str
    skipped: int
    timed: int

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def take_s(self, step: Callable[[], Any], number: int) -> float:
        """Take steps, and return the seconds until the device has finished them."""
        began_s = time.perf_counter()
        for _ in range(number):
            step()
        self.wait()
        return time.perf_counter() - began_s

    def figures(self, *, tokens: float, took_s: float, ready_s: float) -> Result:
        # Reserved bytes, as `baretrain bench` counts them: a CUDA graph keeps memory that no tensor uses.
        memory = torch.cuda.max_memory_reserved() / GIB if self.device == "cuda" else None
        step_ms = 1e3 * took_s / self.timed
        return {
            "step_ms": step_ms,
            "tokens_per_s": tokens / took_s,
            "ready_s": ready_s,
            "memory_gib": memory,
        }


def ours(run: Run, *, more: Sequence[str] = ()) -> Result:
    from train.tools.bench.command import main

    output = run.folder / f"ours_{os.getpid()}.json"
    words = ["backend=ddp", f"backend.device={run.device}", "backend.precision=bf16"]
    words += [f"max_steps={FINE_TUNING if run.work.classifies else LONG_RUN}"]
    words += [f"steps={run.timed}", f"warmup={run.skipped}", f"output={output}", *more]
    if code := main([*run.work.settings(run.folder), *words]):
        raise RuntimeError(f"baretrain bench ended with {code}")
    result = json.loads(output.read_text())
    memory = result["peak_device_bytes"]
    # Means of all timed steps, as for the Trainer: a median would leave out a late recording.
    return {
        "step_ms": 1e3 * result["timed_s"] / run.timed,
        "tokens_per_s": result["timed_tokens"] / result["timed_s"],
        "ready_s": result["compile_s"],
        "memory_gib": None if memory is None else memory / GIB,
        "flops_per_s": result["flops_per_s"],
        "padding_share": result["padding_share"],
        "data_wait_share": result["data_wait_share"],
    }


@dataclass(frozen=True)
class Feed:
    """A class of models and rows for the Trainer, which a collator joins to batches."""

    auto: Any
    rows: list[Any]
    collator: Any = transformers.default_data_collator


def feed_of(run: Run, *, best: bool) -> Feed:
    work = run.work
    if work.answers:
        rows = answered_rows(work, work.batch * 8)
        return Feed(transformers.AutoModelForQuestionAnswering, rows)
    if not work.classifies:
        return Feed(transformers.AutoModelForMaskedLM, masked_rows(work, work.batch * 8))
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        run.folder / "tokenizer", trust_remote_code=False
    )
    multiple = 8 if best else None
    collator = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    auto = transformers.AutoModelForSequenceClassification
    return Feed(auto, labelled_rows(run.folder), collator)


def trainer(run: Run, *, best: bool = False) -> Result:
    work = run.work
    steps = run.skipped + run.timed
    config = work.transformers_config()
    more: dict[str, Any] = {}
    if best:
        more = {
            "torch_compile": True,
            "dataloader_num_workers": 4,
            "dataloader_persistent_workers": True,
        }
        more |= {"tf32": True} if run.device == "cuda" else {"torch_compile_backend": "aot_eager"}
    if work.classifies:
        config.num_labels = 3
        if best:
            more["train_sampling_strategy"] = "group_by_length"
    feed = feed_of(run, best=best)
    torch.manual_seed(0)
    model = feed.auto.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
    # (time, tokens) at start, after one step, at start and end of timing
    marks: list[tuple[float, Any]] = []
    tokens: Any = 0

    def mark() -> None:
        run.wait()
        marks.append((time.perf_counter(), tokens))

    class Metered(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal tokens
            mask = inputs.get("attention_mask")
            if mask is None:
                tokens = tokens + inputs["input_ids"].numel()
            else:
                # It stays on the device: a step that reads it would wait.
                tokens = tokens + mask.sum()
            return super().training_step(model, inputs, *args, **kwargs)

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            mark()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step in (1, run.skipped, steps):
                mark()

    arguments = transformers.TrainingArguments(
        str(run.folder / f"trainer_{os.getpid()}"),
        per_device_train_batch_size=work.batch,
        max_steps=steps,
        bf16=True,
        use_cpu=run.device == "cpu",
        **QUIET,
        **more,
    )
    given = {"train_dataset": feed.rows, "data_collator": feed.collator}
    Metered(model, arguments, **given, callbacks=[Clock()]).train()
    begun, first, start, end = marks
    return run.figures(
        tokens=float(end[1] - start[1]), took_s=end[0] - start[0], ready_s=first[0] - begun[0]
    )


def bound(run: Run) -> Result:
    work = run.work
    torch.manual_seed(0)
    sizes = {"vocab_size": work.vocab_size, "hidden": work.hidden, "layers": work.layers}
    model = BareEncoder(
        **sizes, embedding=work.embedding or work.hidden, shares=work.embedding is not None
    )
    model.to(run.device)
    predictions = round(MASKED * work.seq_len)
    batches = []
    for _ in range(4):
        ids = torch.randint(5, work.vocab_size, (work.batch, work.seq_len))
        positions = torch.rand(work.batch, work.seq_len).argsort(1)[:, :predictions]
        batches.append(
            tuple(each.to(run.device) for each in (ids, positions, ids.gather(1, positions)))
        )
    step = bare_step(model, batches, compiler="inductor" if run.device == "cuda" else "aot_eager")
    ready_s, _ = run.take_s(step, 1), run.take_s(step, run.skipped - 1)
    tokens = run.timed * work.batch * work.seq_len
    return run.figures(tokens=tokens, took_s=run.take_s(step, run.timed), ready_s=ready_s)


CANDIDATES: dict[str, Callable[[Run], Result]] = {
    "ours": ours,
    "ours native": partial(ours, more=("backend.compile=none",)),
    "ours compiled": partial(ours, more=("backend.compile=layers",)),
    "trainer": trainer,
    "trainer best": partial(trainer, best=True),
    "bound": bound,
}
COMPILED = ("ours", "ours compiled", "trainer best", "bound")


def machine(device: str) -> Result:
    """Return the card, and the peak FLOP/s of its matrix products in bf16."""
    from train.config import BackendConfig
    from train.parallel.ddp import DDP
    from train.tools.bench.measure import matmul_flops_per_s

    flops_per_s, size = matmul_flops_per_s(DDP(BackendConfig(device=device, precision="bf16")))
    card = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine()
    )
    return {"card": card, "peak_tflops": flops_per_s / 1e12, "peak_size": size}


# ---- all candidates --------------------------------------------------------------------------------------------------


class Table:
    """The results so far, written to a JSON file after each row."""

    def __init__(self, output: Path) -> None:
        self.output, self.began_s = output, time.monotonic()
        self.content: Result = {
            "date": time.strftime("%F"),
            "command": shlex.join(["benchmarks/gpu.sh", "speed", *sys.argv[1:]]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": {},
            "rows": [],
        }

    @property
    def taken_s(self) -> float:
        return time.monotonic() - self.began_s

    def keep(self, name: str, candidate: str, result: Result) -> None:
        if candidate == "machine":
            self.content["machine"] = result
        else:
            self.content["rows"].append({"work": name, "candidate": candidate, **result})
        self.output.write_text(json.dumps(self.content, indent=1) + "\n")
        shown = {key: value for key, value in result.items() if key != "log"}
        print(f"[{self.taken_s:4.0f} s] {name} {candidate}: {json.dumps(shown)}", flush=True)

    def markdown(self) -> str:
        content, rows = self.content, self.content["rows"]
        device = content["machine"]
        about = f"{content['date']}, {device.get('card', 'unknown card')}, Python {content['python']}, "
        about += f"torch {content['torch']}, transformers {content['transformers']}; `{content['command']}`"
        peak = device.get("peak_tflops")
        if peak:
            about += f". Peak of bf16 matrix products: {peak:.3g} TFLOP/s"
        good = {(row["work"], row["candidate"]): row for row in rows if "error" not in row}
        cells = []
        for row in rows:
            mine, best = (
                good.get((row["work"], "ours"), {}),
                good.get((row["work"], "trainer best")),
            )
            if "error" in row:
                cells.append([row["work"], row["candidate"], row["error"], *[""] * 5])
                continue
            share, speed = "", row["tokens_per_s"]
            if peak and mine.get("flops_per_s") and not mine["padding_share"]:
                share = f"{mine['flops_per_s'] / mine['tokens_per_s'] * speed / peak / 1e12:.3f}"
            ratio = f"{speed / best['tokens_per_s']:.2f}" if best else ""
            memory = "" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}"
            figures = [
                f"{row['step_ms']:.1f}",
                f"{speed:,.0f}",
                ratio,
                share,
                f"{row['ready_s']:.0f}",
                memory,
            ]
            cells.append([row["work"], row["candidate"], *figures])
        head = ["work", "candidate", "ms per step", "tokens/s", "/ trainer best", "share of peak"]
        head += ["compiling and first step, s", "GiB reserved"]
        return f"{about}.\n\n{table(head, cells)}"


def compile_all(runs: Sequence[tuple[str, Run]], folder: Path, budget_s: float) -> None:
    """Fill the cache with a few steps of these candidates, all at the same time."""
    end_s, running = time.monotonic() + budget_s, list[Job]()
    for number, (name, run) in enumerate(runs):
        short = replace(run, skipped=3, timed=3)
        running.append(Job(CANDIDATES[name], short, log=folder / f"compile_{number}.log"))
    while any(job.process.is_alive() for job in running) and time.monotonic() < end_s:
        time.sleep(0.2)
    for job in running:
        job.end()


def is_asked(row: str, only: Sequence[str] | None) -> bool:
    """Return whether the words of one of `only` are in a row's name. "BERT-base" is no word of "ALBERT-base"."""
    return not only or any(re.search(rf"\b{re.escape(each)}", row) for each in only)


def measure(options: argparse.Namespace, folder: Path) -> Table:
    device = "cpu" if options.tiny else "cuda"
    works = [tiny(work) if options.tiny else work for work in WORKS]
    skipped, timed = (3, 3) if options.tiny else (SKIPPED, TIMED)
    answer = Table(options.output)
    runs = []
    for number, work in enumerate(works):
        home = folder / str(number)
        names = [name for name in work.candidates if is_asked(f"{work.name} {name}", options.only)]
        if names:
            job = Job(make_data, work, home, options.rows, log=folder / "data.log")
            made = job.result(MOST_S)
            if made:
                raise SystemExit(f"data of {work.name}: {made['error']}")
        more = max(skipped, SKIPPED_LENGTHS) if work.classifies and not options.tiny else skipped
        runs += [(name, Run(work, home, device, more, timed)) for name in names]
    runs.sort(key=lambda each: (each[1].work.name, each[0]) in MEASURED)
    answer.keep(
        "machine", "machine", Job(machine, device, log=folder / "machine.log").result(MOST_S)
    )
    if not options.tiny:
        compiled = [each for each in runs if each[0] in COMPILED][:TOGETHER]
        compile_all(compiled, folder, COMPILING_SHARE * options.budget_s)
        print(f"[{answer.taken_s:4.0f} s] graphs are compiled", flush=True)
    for name, run in runs:
        left_s = options.budget_s - answer.taken_s
        result: Result = {"error": "no time was left"}
        if left_s >= LEAST_S:
            job = Job(CANDIDATES[name], run, log=folder / "candidate.log")
            result = job.result(min(MOST_S, left_s))
        answer.keep(run.work.name, name, result)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path(os.environ.get("OUT", "."), "gpu.json"), metavar="FILE"
    )
    parser.add_argument(
        "--budget-s", type=float, default=460, metavar="S", help="total seconds [460]"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="parts of names of works and candidates",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE.csv",
        help='rows with a column "text", for the lengths of tweets',
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small models on the CPU, as a test of this script"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as name:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(name, "inductor")))
        # several candidates compile at the same time
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        answer = measure(options, Path(name))
    print(f"\n{answer.markdown()}")
    return int(any("error" in row for row in answer.content["rows"]))


if __name__ == "__main__":
    sys.exit(main())
