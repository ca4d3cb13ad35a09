"""What is wrong with paths, columns, keys and batch sizes is said before a slow library is imported."""

import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from finetuning import tuned
from running import ROOT

SLOW = {"torch", "transformers", "datasets"}
CODE = """if True:
    import atexit, sys
    from train.__main__ import main
    atexit.register(lambda: print("", *sys.modules, sep="\\n"))
    sys.exit(main(sys.argv[1:]))
"""
BASE = "task=classify data=records model=albert_tiny".split()
TRAIN = ["train", *BASE, "run_dir=new", "max_steps=2", "micro_batch_size=2"]


@pytest.fixture(scope="module")
def folder(texts, tokenizer_folder, tmp_path_factory):
    """A trained run, and rows in a file of each format."""
    path = tmp_path_factory.mktemp("early")
    rows = [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(texts[:40])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / "rows.parquet")
    (path / "two.csv").write_text("text,label\na b,pos\nc d,neg\n")
    (path / "one.jsonl").write_text('{"body": "a b", "label": "pos"}\n')
    (path / "empty").mkdir()
    given = ["task=classify", "data=records", f"data.path={path / 'rows.parquet'}", "seq_len=64"]
    tuned(path / "run", tokenizer_folder, *given, "data.lengths=[64]")
    return path


def modules_after(folder, *words):
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, set(done.stdout.splitlines()), done.stderr


REJECTED = [
    ([*TRAIN, "data.path=none.csv"], "none.csv: there is no such file"),
    ([*TRAIN, "data.path=empty"], "empty contains no file that ends in"),
    ([*TRAIN, "data.path=two.csv", "data.columns.label=stars"], "no column stars"),
    ([*TRAIN, "data.path=one.jsonl"], "no column text"),
    ([*TRAIN, "data.path=rows.parquet", "data.columns.text=body"], "no column body"),
    ([*TRAIN, "data.path=two.csv", "max_stepz=2"], "did you mean max_steps"),
    ([*TRAIN, "data.path=two.csv", "global_batch_size=7"], "7 is not a multiple"),
    ([*TRAIN, "data.path=two.csv", "model.pretrained=./none"], "none: there is no such folder"),
    (["train", "run_dir=new", "data.path=empty", *TRAIN[-2:], "model=albert_tiny"], "manifest"),
    (["records", *BASE, "data.path=two.csv", "data.columns.label=stars"], "no column stars"),
    (["records", *BASE, "data.path=rows.parquet", "data.columns.text=body"], "no column body"),
    (["records", *BASE, "data.path=none.csv"], "none.csv: there is no such file"),
    (["evaluate", "./none", "data.path=two.csv"], "none: "),
    (["evaluate", "run", "data.path=none.csv"], "none.csv: there is no such file"),
    (["evaluate", "run", "data.path=one.jsonl"], "no column text"),
    (["evaluate", "run", "data.path=two.csv", "data.columnz.text=a"], "did you mean"),
    (["predict", "run", "data.path=none.csv"], "none.csv: there is no such file"),
    (["predict", "run", "data.path=one.jsonl"], "no column text"),
    (["predict", "run", "data.path=two.csv", "data.columns.label=stars"], "no column stars"),
    (["predict", "./none", "data.path=two.csv"], "none: "),
]


@pytest.mark.parametrize(("words", "says"), REJECTED, ids=[" ".join(each[0]) for each in REJECTED])
def test_it_is_said_before_a_slow_library_is_imported(folder, words, says):
    code, modules, error = modules_after(folder, *words)
    assert code == 2 and says in error and error.count("error: ") == 1, error
    assert not SLOW & modules
    assert not (folder / "new").exists()


@pytest.mark.parametrize("command", ["train", "launch", "records", "predict"])
def test_help_needs_neither_hydra_nor_numpy(folder, command):
    code, modules, _ = modules_after(folder, command, "--help")
    assert code == 0 and not {"hydra", "numpy", "pyarrow", *SLOW} & modules


def test_a_plan_needs_no_numpy(folder):
    words = "launch cluster=local -- experiment=demo run_dir=new data.path=none".split()
    code, modules, error = modules_after(folder, *words)
    assert code == 0 and not {"numpy", "pyarrow", *SLOW} & modules, error
