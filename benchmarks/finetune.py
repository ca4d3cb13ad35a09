"""Fine-tuning of a classifier with our loop and with the Hugging Face Trainer, under the same conditions.

    python -m benchmarks.finetune --model RUN --data tweets.csv [--rounds 3] [--epochs 3] [data.columns.text=body ...]

    workers   transformers' Trainer with DataCollatorWithPadding (a batch is as long as its longest text),
              train_sampling_strategy=group_by_length and one loader process
    workers_eager  workers with attn_implementation="eager"
    buckets   python -m train with batches of the lengths --lengths and --seq-len
    trainer_defaults, defaults  both at their defaults (--variants trainer_defaults defaults): only data, model, batch,
              epochs and learning rate are set, so precision, lengths and loaders differ

Our loop and the Trainer start from the same weights (an encoder and one random head) and have the same tokens (compared
row by row), split, batch, epochs, dropout, clipping, threads and precision. Both use fused AdamW and decay the same
weights. The learning rates are equal, except that the Trainer's warm-up begins at 0, one step behind ours. Rows that do
not fill a batch are left out beforehand, and both read texts that are already tokenized. Every run is a separate
process. Each round runs all variants, in alternating order; the round's number is the seed of data order and dropout.

Training time covers the steps, including waits for data, and compiling, but not the evaluation at the end. tokens/s
counts real tokens, without padding, over this time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer

from benchmarks import harness
from benchmarks.harness import ROOT, Result, measure_table, ratios, run_timed, turns
from train.config import TrainConfig, make_plan, to_dict
from train.run import compose as cli
from train.system.memory import usable_cpus
from train.tasks import build_task

AT_DEFAULTS = ("trainer_defaults", "defaults")
THEIRS, OURS = ("workers", "workers_eager", "trainer_defaults"), ("buckets", "defaults")
VARIANTS = (*THEIRS, *OURS)
EVAL_BATCH = 128
MEASURES = {
    "tokens_per_s": "real tokens/s in training",
    "final_f1": "final macro F1",
    "padding_share": "padding, share of computed tokens",
    "command_s": "the whole command, s",
}
SETTINGS = """
    task=classify model=any optim=finetune backend=ddp
    backend.device=cpu log_every=50 checkpoint.every=1000000 export=false tensorboard=false
"""


def settings(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the settings that all our runs share."""
    chosen = [f"backend.precision={options.precision}", f"seq_len={options.seq_len}"]
    return [
        *SETTINGS.split(),
        *([] if options.at_defaults else chosen),
        f"global_batch_size={options.batch}",
        f"eval_batch_size={EVAL_BATCH}",
        f"max_epochs={options.epochs}",
        "eval_every=null",
        f"optim.lr={options.lr}",
        f"data.cache_dir={folder / 'cache'}",
    ]


def prepare(options: argparse.Namespace, folder: Path) -> Result:
    """Write what the runs share: data/ (rows), tokens/ (for the Trainer), start/ (weights) and facts.json.

    Return the content of facts.json.
    """
    reading = ["data=tweets", f"data.path={options.data.resolve()}", *options.overrides]
    words = [*settings(options, folder), *reading, f"model.init_from={options.model}", f"run_dir={folder / 'none'}"]
    rows = build_task(cli.load_config(TrainConfig, words)).train_rows
    whole = [f"data.max_train_examples={rows // options.batch * options.batch or rows}"]  # whole batches
    cfg = cli.load_config(TrainConfig, [*words, *whole])
    task: Any = build_task(cfg)
    plan = make_plan(cfg, world_size=1, rows=task.train_rows, seq_len=task.seq_len)
    torch.manual_seed(0)
    task.export(task.build_model(), folder / "start")
    tokenizer = AutoTokenizer.from_pretrained(folder / "start", trust_remote_code=False)

    def tokens_of(rows: Any) -> dict[str, Any]:
        texts = [rows[name] for name in ("text", "text_pair") if name in rows]
        return {**tokenizer(*texts, truncation=True, max_length=task.sizes.seq_len), "labels": rows["label"]}

    rows_of = {}
    for split in ("train", "validation"):
        rows = task.tables.examples(split)
        tokens = rows.map(tokens_of, batched=True, remove_columns=rows.column_names)
        if list(tokens["input_ids"]) != list(task.tables.features(split)["input_ids"]):
            raise RuntimeError(f"{split}: the Trainer would read different tokens than our loop")
        tokens.save_to_disk(folder / "tokens" / split)
        rows_of[split] = len(rows)
    examples = datasets.DatasetDict({split: task.tables.examples(split) for split in rows_of})
    examples.save_to_disk(folder / "data")
    columns = [f"data.columns.{name}={name}" for name in examples["train"].column_names]
    facts = {"steps": plan.total_steps, "warmup_steps": plan.warmup_steps, "rows": rows_of}
    facts |= {"labels": task.labels, "settings": to_dict(cfg), "columns": columns}
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


def read_ours(run_dir: Path) -> Result:
    """Return the result of a run in the form of benchmarks/peers/trainer.py."""
    train_s = tokens = slots = 0.0
    step = 0
    for line in harness.lines(run_dir, "train"):
        busy_s = line["step_s"] * (line["step"] - step)
        step, train_s = line["step"], train_s + busy_s
        tokens += line["tokens_per_s"] * busy_s
        slots += line["tokens_per_s"] * busy_s / (1 - line.get("padding_share", 0.0))
    train_s += harness.lines(run_dir, "summary")[-1]["compile_s"]
    f1 = harness.lines(run_dir, "eval")[-1]["f1_macro"]
    return {"tokens": round(tokens), "slots": round(slots), "step": step, "train_s": train_s, "f1": f1}


def run_variant(options: argparse.Namespace, variant: str, seed: int, folder: Path) -> Result:
    run_dir = Path(tempfile.mkdtemp(prefix=f"{variant}-", dir=folder))
    result = run_dir / "result.json"
    words = ["benchmarks.peers.trainer", variant, str(folder), str(seed), str(result)]
    if variant in OURS:
        words = ["train", *settings(options, folder), "data=records", f"data.path={folder / 'data'}"]
        words += ["data.validation=validation", *json.loads((folder / "facts.json").read_text())["columns"]]
        words += [f"model.init_from={folder / 'start'}", f"run_dir={run_dir}", f"seed={seed}"]
        if not options.at_defaults:
            lengths = [*options.lengths, options.seq_len]
            words += [f"data.lengths={lengths}", "data.num_workers=0", "backend.compile=none"]
    usage = run_timed(*words, log=run_dir.with_suffix(".log"), OMP_NUM_THREADS=str(options.threads))
    seen = read_ours(run_dir) if variant in OURS else json.loads(result.read_text())
    return {
        "work": (seen["tokens"], seen["step"]),
        "tokens_per_s": seen["tokens"] / seen["train_s"],
        "final_f1": seen["f1"],
        "padding_share": 1 - seen["tokens"] / seen["slots"],
        "command_s": usage.wall_s,
    }


def benchmark(options: argparse.Namespace) -> None:
    """Print all measures of all variants, and ratios of ours to theirs within a round.

    Raises RuntimeError unless all runs had the same number of tokens and steps.
    """
    rounds: list[dict[str, Result]] = [{} for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="finetune-") as name:
        folder = Path(name)
        facts = prepare(options, folder)
        for number, variant in turns(options.rounds, options.variants):
            rounds[number][variant] = run_variant(options, variant, number, folder)
            print(f"round {number + 1} of {options.rounds}: {variant} done", file=sys.stderr)
    if len(work := {result["work"] for results in rounds for result in results.values()}) != 1:
        raise RuntimeError(f"tokens or steps of the runs differ: {sorted(work)}")
    values = {
        variant: {measure: [results[variant][measure] for results in rounds] for measure in MEASURES}
        for variant in options.variants
    }
    for ours, theirs in ((a, b) for a in OURS for b in THEIRS if {a, b} <= set(options.variants)):
        pair = values[ours], values[theirs]
        values[f"{ours} / {theirs}"] = {
            measure: ratios(*(each[measure] for each in pair)) for measure in ("tokens_per_s", "command_s")
        }
    counts = f"{facts['rows']['train']:,} training texts, {facts['rows']['validation']:,} validation texts"
    precision = "both at their defaults" if options.at_defaults else options.precision
    steps = f"{facts['steps']:,} steps of {options.batch}, {precision}, {options.threads} threads"
    print(f"{options.data.name}: {counts}, {len(facts['labels'])} classes; {steps}")
    print(f"{harness.machine('torch', 'transformers')}\n")
    print(measure_table(MEASURES, values))


def main(words: list[str]) -> None:
    parser = harness.parser(__doc__, rounds=3, epochs=3, batch=32, seq_len=64, threads=usable_cpus())
    parser.add_argument("overrides", nargs="*", metavar="data.KEY=VALUE", help="how to read the data: see conf/data")
    parser.add_argument("--data", type=Path, default=ROOT / "tests" / "inputs" / "tweets.csv", help="a CSV file")
    parser.add_argument("--model", required=True, help="initial weights: a run, or a transformers folder")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--lengths", type=int, nargs="*", default=[32, 48], help="lengths of buckets below --seq-len")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["workers", "workers_eager", "buckets"])
    options = parser.parse_args(words)
    options.at_defaults = set(options.variants) <= set(AT_DEFAULTS)
    if not options.at_defaults and set(options.variants) & set(AT_DEFAULTS):
        parser.error(f"{' and '.join(AT_DEFAULTS)} keep each side's default lengths: run them separately")
    if set(options.variants) & set(THEIRS) and importlib.util.find_spec("accelerate") is None:
        parser.error("the Trainer needs accelerate (make bench shows how); or leave it out with --variants")
    benchmark(options)


if __name__ == "__main__":
    main(sys.argv[1:])
