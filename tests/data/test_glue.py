"""GLUE's data sets as the Hub and GLUE's own archives hold them, made up here: none of the real ones is at hand."""

from pathlib import Path
from tempfile import mkdtemp

import datasets
import pytest

from train.config import S3Config, TrainConfig
from train.config.train import CompareConfig
from train.data.records.raw import read_raw, read_texts
from train.run import compose as cli
from train.tasks import best_metric
from train.tasks.classify import CLASSIFY_ROWS
from train.tasks.regress import regress_rows
from train.tools.compare import make_variants

SENTENCES = ["sentence1", "sentence2"]
SHAPES = {  # the Hub's columns of texts, its labels in order, and header and lines of GLUE's own files
    "cola": (["sentence"], ["unacceptable", "acceptable"], "", "gj04\t{label}\t*\t{0}"),
    "mrpc": (
        SENTENCES,
        ["not_equivalent", "equivalent"],
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "{label}\t70{idx}\t71{idx}\t{0}\t{1}",
    ),
    "qqp": (
        ["question1", "question2"],
        ["not_duplicate", "duplicate"],
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "{idx}\t30{idx}\t31{idx}\t{0}\t{1}\t{label}",
    ),
    "stsb": (
        SENTENCES,
        [],
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "{idx}\tmain-captions\tMSRvid\t2012test\t000{idx}\tnone\tnone\t{0}\t{1}\t{label:.3f}",
    ),
    "qnli": (
        ["question", "sentence"],
        ["entailment", "not_entailment"],
        "index\tquestion\tsentence\tlabel",
        "{idx}\t{0}\t{1}\t{name}",
    ),
}
OF_TEST = {  # header and lines without labels, where they are more than these without their last column
    "cola": ("index\tsentence", "{idx}\t{0}"),
    "mrpc": ("index\t#1 ID\t#2 ID\t#1 String\t#2 String", "{idx}\t70{idx}\t71{idx}\t{0}\t{1}"),
}
NAMES = "cola mnli mrpc qnli qqp rte sst2 stsb wnli".split()
COUNTS = {"train": 24, "validation": 10, "test": 4}


def rows_of(name: str, split: str) -> list[dict]:
    """Rows as the Hub has them. A text begins with a quotation mark that nothing closes."""
    texts, labels, *_ = SHAPES[name]
    rows = [
        {text: f'"{split} {at} of {number}' for at, text in enumerate(texts)}
        for number in range(COUNTS[split])
    ]
    known = [number % 2 if labels else number / 8 for number in range(COUNTS[split])]
    return [
        row | {"label": -1 if split == "test" else known[idx], "idx": idx}
        for idx, row in enumerate(rows)
    ]


def write_tsv(folder: Path, name: str) -> Path:
    """The folder of a data set in GLUE's archive; its test set has no labels."""
    texts, labels, *known = SHAPES[name]
    unknown = OF_TEST.get(name) or [text.rpartition("\t")[0] for text in known]
    folder.mkdir()
    for file, split in {"train": "train", "dev": "validation", "test": "test"}.items():
        header, line = unknown if split == "test" else known
        lines = [header] if header else []
        for row in rows_of(name, split):
            names = {
                "idx": row["idx"],
                "label": row["label"],
                "name": labels and labels[row["label"]],
            }
            lines.append(line.format(*(row[text] for text in texts), **names))
        if (name, split) == ("qqp", "train"):
            lines.insert(3, "7\t14\t15\tis this line whole")
        text = "".join(f"{each}\n" for each in lines)
        (folder / f"{file}.tsv").write_text(
            text, encoding="utf-8", newline="\r\n" if name == "mrpc" else None
        )
    return folder


def write_hub(folder: Path, name: str) -> Path:
    """A clone of the Hub's data set, which names its splits in its README.md."""
    texts, labels, *_ = SHAPES[name]
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


@pytest.mark.parametrize("form", ["hub", "tsv"])
@pytest.mark.parametrize("name", SHAPES)
def test_both_forms_of_a_data_set_are_the_same_rows(tmp_path, name, form):
    texts, labels, header, _ = SHAPES[name]
    path = (
        write_hub(tmp_path / "glue", name) if form == "hub" else write_tsv(tmp_path / name, name)
    )
    kind, task = (CLASSIFY_ROWS, "classify") if labels else (regress_rows(["label"]), "regress")
    given = [
        f"task={task}",
        f"data={name}",
        *(["data.format=csv"] if form == "tsv" else []),
        f"data.path={path}",
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
        assert raw.dropped[split].bad_rows == ((name, form, split) == ("qqp", "tsv", "train"))
    assert raw.labels == labels
    if form == "tsv" and header:
        new = list(read_texts(cfg, kind, str(path / "test.tsv"), S3Config(), labels=labels))
        assert values(new, keys) == values(rows_of(name, "test"), texts) and "label" not in new[0]


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
