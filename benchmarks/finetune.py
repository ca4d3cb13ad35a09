"""Fine-tuning a classifier with our loop and with the Hugging Face Trainer, in one run, to the same macro F1.

    python -m benchmarks.finetune --model RUN --data tweets.csv [--rounds 3] [--epochs 3] [data.columns.text=body ...]

    trainer   transformers' Trainer, DataCollatorWithPadding (a batch is as long as its longest text), random order
    grouped   the same with train_sampling_strategy=group_by_length
    workers   grouped with a process that loads
    workers_eager  workers with attn_implementation="eager"
    grouped_compiled  grouped with torch_compile
    buckets   python -m train with batches of the lengths --lengths and --seq-len
    buckets_workers  buckets with a process that loads
    compiled  buckets with backend.compile=layers
    trainer_defaults, defaults  both at their defaults (--variants trainer_defaults defaults): only data, model, batch,
              epochs, rate and the times of evaluations are given, so that precision, lengths and loaders are each one's

The same start weights (an encoder and one random head), tokens (compared, row by row), split, batch, epochs, dropout,
fused AdamW with the same weights decayed, clipping, threads and precision; the rate falls alike, only the Trainer's
warm-up begins at 0, a step behind ours. Rows that fill no batch are left out beforehand, and both find their texts
tokenised. Every run is a separate process; rounds go through all variants, forwards and backwards in turn; the seed
of order and dropout is the round's number. --published uses on both sides the activation of the published ALBERTs,
"gelu_new", eight operations in transformers and one kernel in ours.

Seconds of training are those of steps with the wait for their data and with compiling, without evaluations and log
lines; tokens/s is real tokens, without padding, over these. The target is a share of the lowest final F1 of all runs;
seconds are to the end of the step before the first evaluation that reached it. Shapes are distinct [batch, seq].

Without --model both begin with a random BERT of 6 layers of 384, whose tokenizer is trained on the texts: enough for
seconds, not for F1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import ROOT, Result, measure_table, run_timed, three, turns
from train.system.memory import usable_cpus

# No torch here: at a start the kernel counts the parent's memory as the peak of its child.

THEIRS, OURS = (
    ("trainer", "grouped", "workers", "workers_eager", "grouped_compiled", "trainer_defaults"),
    ("buckets", "buckets_workers", "compiled", "defaults"),
)
AT_DEFAULTS = ("trainer_defaults", "defaults")
VARIANTS = (*THEIRS, *OURS)
EVAL_BATCH, TARGET_SHARE = 128, 0.98
MEASURES = {  # measures in the table, and whether more (1) or less (-1) is better
    "tokens_per_s": ("real tokens/s in training", 1),
    "to_target_s": ("training until the target, s", -1),
    "to_target_all_s": ("the same with the evaluations, s", -1),
    "final_f1": ("final macro F1", 0),
    "padding_share": ("padding, share of the tokens computed", 0),
    "train_shapes": ("distinct shapes in training", 0),
    "eval_shapes": ("distinct shapes in evaluations", 0),
    "eval_s": ("an evaluation, s", -1),
    "start_s": ("imports, model, data: until the first step, s", -1),
    "command_s": ("the whole command, s", -1),
    "cpu_s": ("the whole command, CPU s", -1),
    "peak_rss_mib": ("peak memory, MiB", -1),
}


SETTINGS = """
    task=classify model=any optim=finetune backend=ddp
    backend.device=cpu log_every=50 checkpoint.every=1000000 export=false tensorboard=false
"""


def settings(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the settings that all our runs have in common."""
    chosen = [f"backend.precision={options.precision}", f"seq_len={options.seq_len}"]
    return [
        *SETTINGS.split(),
        *([] if options.at_defaults else chosen),
        f"global_batch_size={options.batch}",
        f"eval_batch_size={EVAL_BATCH}",
        f"max_epochs={options.epochs}",
        f"eval_every={options.eval_every}",
        f"optim.lr={options.lr}",
        f"data.cache_dir={folder / 'cache'}",
    ]


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Prepare the files that the runs share: tables data/, tokens/ for the Trainer, weights start/, facts.json."""
    import numpy as np
    import torch
    from transformers import AutoTokenizer

    from train.config import TrainConfig, make_plan, to_dict
    from train.run import compose as cli
    from train.tasks import build_task

    reading = ["data=tweets", f"data.path={options.data.resolve()}", *options.overrides]
    model = options.model or random_encoder(options.data, folder / "random")
    words = [*settings(options, folder), *reading, f"model.init_from={model}", f"run_dir={folder / 'none'}"]
    rows = build_task(cli.load_config(TrainConfig, words)).train_rows
    whole = [f"data.max_train_examples={rows // options.batch * options.batch or rows}"]  # batches
    cfg = cli.load_config(TrainConfig, [*words, *whole, f"data.save_to={folder / 'data'}"])
    task: Any = build_task(cfg)
    plan = make_plan(cfg, world_size=1, rows=task.train_rows, seq_len=task.seq_len)
    torch.manual_seed(0)
    task.export(task.build_model(), folder / "start")
    if options.published:
        path = folder / "start" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "gelu_new"}))
    tokenizer = AutoTokenizer.from_pretrained(folder / "start", trust_remote_code=False)

    def tokens_of(rows: Any) -> dict[str, Any]:
        texts = [rows[name] for name in ("text", "text_pair") if name in rows]
        return {**tokenizer(*texts, truncation=True, max_length=task.sizes.seq_len), "labels": rows["label"]}

    lengths = task.lengths if options.at_defaults else [*options.lengths, options.seq_len]
    rows_of, shapes = {}, {}
    for split in ("train", "validation"):
        rows = task.tables.examples(split)
        tokens = rows.map(tokens_of, batched=True, remove_columns=rows.column_names)
        if list(tokens["input_ids"]) != list(task.tables.features(split)["input_ids"]):
            raise RuntimeError(f"{split}: the Trainer would not read the same tokens as ours")
        tokens.save_to_disk(folder / "tokens" / split)
        rows_of[split] = len(rows)
        shapes[split] = len(np.unique(np.searchsorted(lengths, task.tables.lengths(split))))
    facts = {"steps": plan.total_steps, "warmup_steps": plan.warmup_steps, "rows": rows_of, "shapes": shapes}
    (folder / "facts.json").write_text(json.dumps({**facts, "labels": task.labels, "settings": to_dict(cfg)}))


def random_encoder(data: Path, folder: Path) -> Path:
    """Write a random BERT of 6 layers of 384 and a tokenizer of the lines of `data`. Return the folder."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator(data.read_text().splitlines(), vocab_size=30522, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=pieces._tokenizer)
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read_ours(run_dir: Path, shapes: Mapping[str, int]) -> Result:
    """Read metrics.jsonl into the form of peers/trainer.py's Meter.result(). A line of steps precedes evaluations."""
    from train.observe.lines import read_lines
    from train.system.folders import LocalFolder

    begun_unix_s = train_s = tokens = slots = 0.0
    step, evaluations = 0, []
    for line in read_lines(LocalFolder(run_dir)):
        if line["kind"] == "train":
            busy_s = line["step_s"] * (line["step"] - step)
            begun_unix_s = begun_unix_s or line["time_unix_s"] - busy_s
            step, train_s = line["step"], train_s + busy_s
            tokens += line["tokens_per_s"] * busy_s
            slots += line["tokens_per_s"] * busy_s / (1 - line.get("padding_share", 0.0))
        elif line["kind"] == "summary":
            train_s += line["compile_s"]
        elif line["kind"] == "eval":
            times = {"eval_s": line["eval_s"], "train_s": train_s, "all_s": line["time_unix_s"] - begun_unix_s}
            evaluations.append({"step": line["step"], "f1": line["f1_macro"], **times})
    result = {"begun_unix_s": begun_unix_s, "tokens": round(tokens), "slots": round(slots), "step": step}
    return {**result, "train_s": train_s, "evaluations": evaluations, "shapes": dict(shapes)}


def run_variant(options: argparse.Namespace, variant: str, seed: int, folder: Path, facts: Result) -> Result:
    run_dir = Path(tempfile.mkdtemp(prefix=f"{variant}-", dir=folder))
    result = run_dir / "result.json"
    words = ["benchmarks.peers.trainer", variant, str(folder), str(seed), str(result)]
    if variant in OURS:
        words = ["train", *settings(options, folder), "data=records", "data.format=saved", f"seed={seed}"]
        words += [f"data.path={folder / 'data'}", f"model.init_from={folder / 'start'}", f"run_dir={run_dir}"]
        if not options.at_defaults:
            words += [f"data.lengths={[*options.lengths, options.seq_len]}"]
            words += [f"data.num_workers={int(variant == 'buckets_workers')}"]
            words += [f"backend.compile={'layers' if variant == 'compiled' else 'none'}"]
    usage = run_timed(*words, log=run_dir.with_suffix(".log"), OMP_NUM_THREADS=str(options.threads))
    own = read_ours(run_dir, facts["shapes"]) if variant in OURS else json.loads(result.read_text())
    return {
        **own,
        "start_s": own["begun_unix_s"] - usage.began_unix_s,
        "command_s": usage.wall_s,
        "cpu_s": usage.cpu_s,
        "peak_rss_mib": usage.peak_rss_mib,
    }


def measures(result: Result, target: float) -> dict[str, float]:
    """Return the measures of one run."""
    reached = next(one for one in result["evaluations"] if one["f1"] >= target)
    return {
        "tokens_per_s": result["tokens"] / result["train_s"],
        "to_target_s": reached["train_s"],
        "to_target_all_s": reached["all_s"],
        "final_f1": result["evaluations"][-1]["f1"],
        "padding_share": 1 - result["tokens"] / result["slots"],
        "train_shapes": result["shapes"]["train"],
        "eval_shapes": result["shapes"]["validation"],
        "eval_s": statistics.median(one["eval_s"] for one in result["evaluations"]),
        **{name: result[name] for name in ("start_s", "command_s", "cpu_s", "peak_rss_mib")},
    }


def compare(rounds: list[dict[str, Result]]) -> Result:
    """Return every measure of every variant, and ours against theirs of the same round: least, median, greatest.

    Above 1 ours is better. Raises RuntimeError unless all runs learnt from equally many tokens and were evaluated after
    the same steps.
    """
    runs = [result for round_ in rounds for result in round_.values()]
    work = {(result["tokens"], result["step"], *(one["step"] for one in result["evaluations"])) for result in runs}
    if len(work) != 1:
        raise RuntimeError(f"tokens, steps or evaluations of the runs differ: {sorted(work)}")
    target = TARGET_SHARE * min(result["evaluations"][-1]["f1"] for result in runs)
    measured = [{variant: measures(result, target) for variant, result in round_.items()} for round_ in rounds]
    variants = [variant for variant in VARIANTS if variant in measured[0]]
    values = {
        variant: {name: three([one[variant][name] for one in measured]) for name in MEASURES} for variant in variants
    }
    against = {}
    for ours, theirs in ((a, b) for a in OURS for b in THEIRS if {a, b} <= set(values)):
        against[f"{ours} against {theirs}"] = {
            name: three([(one[ours][name] / one[theirs][name]) ** sense for one in measured])
            for name, (_, sense) in MEASURES.items()
            if sense
        }
    return {"target_f1": round(target, 4), "values": values, "against": against}


def benchmark(options: argparse.Namespace, words: list[str]) -> None:
    rounds: list[dict[str, Result]] = [{} for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="finetune-") as name:
        folder, threads = Path(name), str(options.threads)
        own = ["benchmarks.finetune", "--prepare", name, *words]  # after a -- it would be an override
        run_timed(*own, log=folder / "prepare.log", OMP_NUM_THREADS=threads)
        facts = json.loads((folder / "facts.json").read_text())
        for number, variant in turns(options.rounds, options.variants):
            rounds[number][variant] = run_variant(options, variant, number, folder, facts)
            print(f"round {number + 1} of {options.rounds}: {variant} done", file=sys.stderr)
    result = compare(rounds)
    counts = f"{facts['rows']['train']:,} texts to learn, {facts['rows']['validation']:,} to judge"
    precision = "both at their defaults" if options.at_defaults else options.precision
    steps = f"{facts['steps']:,} steps of {options.batch}, {precision}, {options.threads} threads"
    print(f"{options.data.name}: {counts}, {len(facts['labels'])} classes; {steps}")
    print(f"{harness.machine('torch', 'transformers')}")
    print(f"target: macro F1 {result['target_f1']:g}, {TARGET_SHARE:g} of the lowest final one\n")
    labels = {name: label for name, (label, _) in MEASURES.items()}
    print(measure_table(labels, result["values"]))
    if result["against"]:
        print(f"\nOurs against theirs, above 1 where ours is better:\n\n{measure_table(labels, result['against'])}")
    print(f"\n{json.dumps(result)}")


def main(words: list[str]) -> None:
    parser = harness.parser(__doc__, rounds=3, epochs=3, batch=32, eval_every=100, seq_len=64, threads=usable_cpus())
    parser.add_argument("overrides", nargs="*", metavar="data.KEY=VALUE", help="how to read the data: see conf/data")
    parser.add_argument("--data", type=Path, default=ROOT / "tests" / "inputs" / "tweets.csv", help="a CSV file")
    parser.add_argument("--model", help="to begin from: a run, or a folder of transformers [a random BERT]")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--lengths", type=int, nargs="*", default=[32, 48], help="shorter ones of buckets, rising")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--published", action="store_true", help="name ALBERT's activation as the published ones do")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=[name for name in VARIANTS if name not in AT_DEFAULTS]
    )
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)  # for the first process of a benchmark
    options = parser.parse_args(words)
    options.at_defaults = set(options.variants) <= set(AT_DEFAULTS)
    if not options.at_defaults and set(options.variants) & set(AT_DEFAULTS):
        parser.error(f"{' and '.join(AT_DEFAULTS)} read the texts as each does by default: run them by themselves")
    if set(options.variants) & set(THEIRS) and importlib.util.find_spec("accelerate") is None:
        parser.error("the Trainer needs accelerate (make bench shows how); or leave it out with --variants")
    if options.prepare:
        prepare(options, options.prepare)
    else:
        benchmark(options, words)


if __name__ == "__main__":
    main(sys.argv[1:])
