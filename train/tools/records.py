"""The command `baretrain records key=value ...`, which prepares and describes labelled examples.

It prepares them as `baretrain train` would with the same settings, and prints classes, lengths, padding and bad rows.
Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from train.config import RecordsConfig, TrainConfig, check, plural, shortlist
from train.machine.console import note, say
from train.run import compose as cli
from train.run.early import check_early
from train.tasks import build_task

if TYPE_CHECKING:
    from train.data.records.tables import Tables

# settings required by a run, but not used here
NO_RUN = [
    "run_dir=runs/records",
    "max_steps=1",
    "micro_batch_size=1",
]
SHOWN_CLASSES = 50
USED = (
    *("data.path", "data.format", "data.train", "data.validation", "data.validation_fraction"),
    *("data.labels", "data.label_map", "data.max_bad_rows", "data.lengths", "data.delimiter"),
    *("seq_len", "model.pretrained", "model.tokenizer"),
)


def main(arguments: Sequence[str]) -> int:
    parser = cli.settings_parser(
        "records",
        TrainConfig,
        "Prepare labelled examples as train would with the same settings, and show classes, lengths and bad rows.",
        examples=(
            "experiment=tweets_trainium data.path=tweets.csv",
            "task=classify data=csv data.path=reviews.csv data.columns.text=body model.pretrained=runs/demo",
            "task=regress data=csv data.path=ratings.csv data.columns.label=score model.pretrained=runs/demo",
        ),
        keys=USED,
    )
    return cli.run(TrainConfig, show, parser, arguments=arguments, given=NO_RUN)


def show(cfg: TrainConfig) -> int:
    check(
        isinstance(cfg.data, RecordsConfig),
        f"task={cfg.task.kind} learns from shards, which baretrain shards shows; choose a task that "
        "learns from labelled records",
    )
    check_early(cfg, world_size=1)
    note(f"... opening data.path={cfg.data.path}")
    # torch takes seconds to import, so check the settings first
    from train.tasks.finetune import (
        TextTask,
    )

    task = build_task(cfg)
    assert isinstance(cfg.data, RecordsConfig) and isinstance(task, TextTask)
    for line in (*description(task.tables), task.summary(), *task.remarks):
        say(line)
    return cli.DONE


def description(tables: Tables) -> Iterator[str]:
    """Yield lines about the folder and each split."""
    kind, seq_len = tables.facts["kind"], tables.facts["settings"]["seq_len"]
    yield f"{tables.folder}: id {tables.id[:12]}, {kind}, at most {seq_len} tokens"
    for split, facts in tables.facts["splits"].items():
        yield f"{split}: {facts['examples']:,} examples, {facts['rows']:,} rows of tokens"
        total = sum(facts["label_counts"].values())
        counts = [f"{name} {n:,} ({n / total:.1%})" for name, n in facts["label_counts"].items()]
        if counts:
            yield f"  classes   {shortlist(counts, SHOWN_CLASSES)}"
        quantiles = [f"{name} {n:,}" for name, n in facts["length_quantiles"].items()]
        yield f"  tokens    {', '.join(quantiles)}"
        for name, number in facts["notes"].items():
            if name not in ("truncated", "tokens_cut"):
                yield f"  {name.replace('_', ' ')}: {number:,.10g}"
        if facts["bad_rows"] or facts["left_out"]:
            bad = plural(facts["bad_rows"], "bad row")
            yield f"  left out  {bad}, {facts['left_out']:,} by data.label_map"
            yield from (f"    {example}" for example in facts["bad_examples"])
