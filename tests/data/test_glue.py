"""GLUE's data sets as the Hub and GLUE's own archives hold them, made up here: none of the real ones is at hand."""

import json
from pathlib import Path
from tempfile import mkdtemp

import datasets
import pytest
from finetuning import FP32, tuned, write_rows

from train.config import S3Config, TrainConfig
from train.config.train import CompareConfig
from train.data.records.raw import read_raw
from train.run import compose as cli
from train.tasks import best_metric
from train.tasks.classify import CLASSIFY_ROWS
from train.tasks.regress import regress_rows
from train.tools import predict
from train.tools.compare import make_variants

SENTENCES = ["sentence1", "sentence2"]
SHAPES = {  # the Hub's columns of texts, and its labels in order
    "cola": (["sentence"], ["unacceptable", "acceptable"]),
    "mrpc": (SENTENCES, ["not_equivalent", "equivalent"]),
    "stsb": (SENTENCES, []),
    "qnli": (["question", "sentence"], ["entailment", "not_entailment"]),
}
NAMES = "cola mnli mrpc qnli qqp rte sst2 stsb wnli".split()
COUNTS = {"train": 24, "validation": 10, "test": 4}


def rows_of(name: str, split: str) -> list[dict]:
    """Rows as the Hub has them. A text begins with a quotation mark that nothing closes."""
    texts, labels = SHAPES[name]
    rows = [
        {text: f'"{split} {at} of {number}' for at, text in enumerate(texts)}
        for number in range(COUNTS[split])
    ]
    known = [number % 2 if labels else number / 8 for number in range(COUNTS[split])]
    return [
        row | {"label": -1 if split == "test" else known[idx], "idx": idx}
        for idx, row in enumerate(rows)
    ]


def write_hub(folder: Path, name: str) -> Path:
    """A clone of the Hub's data set, which names its splits in its README.md."""
    texts, labels = SHAPES[name]
    label = datasets.ClassLabel(names=labels) if labels else datasets.Value("float32")
    types = {
        **dict.fromkeys(texts, datasets.Value("string")),
        "label": label,
        "idx": datasets.Value("int32"),
    }
    head = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    (folder / name).mkdir(parents=True)
    for split in COUNTS:
        table = datasets.Dataset.from_list(rows_of(name, split), features=datasets.Features(types))
        table.to_parquet(folder / name / f"{split}-00000-of-00001.parquet")
        head += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))
    return folder


def values(rows, columns: list[str]) -> list[list]:
    return [[row[column] for column in columns] for row in rows]


@pytest.mark.parametrize("name", SHAPES)
def test_a_data_set_of_the_hub_has_its_rows(tmp_path, name):
    texts, labels = SHAPES[name]
    kind, task = (CLASSIFY_ROWS, "classify") if labels else (regress_rows(["label"]), "regress")
    given = [
        f"task={task}",
        f"data={name}",
        f"data.path={write_hub(tmp_path / 'glue', name)}",
        "run_dir=x",
        "max_steps=1",
    ]
    cfg = cli.load_config(TrainConfig, [*given, "micro_batch_size=1"]).data
    raw = read_raw(cfg, kind, S3Config(), seed=0, folder=Path(mkdtemp(dir=tmp_path)))
    keys = ["text", "text_pair"][: len(texts)]
    for split in ("train", "validation"):
        wanted = rows_of(name, split)
        assert values(raw.splits[split], keys) == values(wanted, texts)
        assert raw.splits[split]["label"] == [
            row["label"] if labels else [row["label"]] for row in wanted
        ]
    assert raw.labels == labels


def test_a_run_on_cola_is_judged_by_matthews_correlation(tmp_path, tokenizer_folder, capsys):
    best = ["best.metric=matthews_correlation", "checkpoint.best=true", "seq_len=32"]
    path = f"data.path={write_hub(tmp_path / 'glue', 'cola')}"
    run = tuned(tmp_path / "run", tokenizer_folder, "task=classify", "data=cola", path, *best)
    new = tmp_path / "new.jsonl"
    write_rows(new, [{"sentence": f"{row} of 4"} for row in range(4)])
    assert predict.main([str(run), f"data.path={new}", *FP32]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 4
    assert {line["prediction"] for line in answers} <= {"unacceptable", "acceptable"}


def test_the_table_of_glue_has_three_seeds_of_each_data_set():
    cli.add_schema(CompareConfig, "compare", [])
    given = ["experiment=glue_bert", "compare=glue"]
    variants = make_variants(cli.load_config(CompareConfig, given), given)
    assert {variant.name for variant in variants} == {
        f"{name}_{n}" for name in NAMES for n in (1, 2, 3)
    }
    for variant in variants:
        cfg, name = variant.cfg, variant.name[:-2]
        assert (cfg.data.path, cfg.data.name, f"{name}_{cfg.seed}") == (
            "nyu-mll/glue",
            name,
            variant.name,
        )
        assert (cfg.task.kind == "regress") == (name == "stsb") and best_metric(cfg).sign == 1
