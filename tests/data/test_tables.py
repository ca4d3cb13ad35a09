"""Prepared examples: made once, found again, whole or not there, the same on all ranks of a machine."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from finetuning import tuning, word_tokenizer
from rejections import rejects
from tokenizers import processors
from transformers import AutoTokenizer

from train.config import TrainConfig, check
from train.data.records.table_facts import best_lengths, length_histogram, padding_share
from train.data.records.tables import Tables, once_per_machine, open_tables
from train.run import compose as cli
from train.tasks.classify import CLASSIFY_ROWS, ClassifyFeaturizer
from train.tools import records

WORDS = "good bad day sun rain very so and the not".split()
SEQ_LEN, ROWS = 16, 1200


def tokenizer_of(words):
    tokenizer, special = word_tokenizer(words), [("[CLS]", 2), ("[SEP]", 3)]
    single = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = single
    return tokenizer


class Words(ClassifyFeaturizer):
    """`calls` is what it was asked for, and `before` what happens before that."""

    def __init__(self, words=WORDS, before=lambda: None, **settings):
        super().__init__(tokenizer_of(words), seq_len=SEQ_LEN)
        self.settings |= settings
        self.before, self.calls = before, []

    def features(self, rows, indices, *, split):
        self.before()
        self.calls.append((split, len(indices)))
        return super().features(rows, indices, split=split)


@pytest.fixture(scope="module")
def plain():
    overrides = [
        "task=classify",
        "data=records",
        "data.path=x",
        "run_dir=run",
        "micro_batch_size=2",
        "max_steps=1",
    ]
    return cli.load_config(TrainConfig, overrides)


@pytest.fixture
def raw(tmp_path):
    """train.csv with a bad row and two that are left out, and dev.csv."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(1, 20))) for _ in range(ROWS)]
    rows = [f"{text},{'pn'[number % 3 == 0]}\n" for number, text in enumerate(texts)]
    (tmp_path / "train.csv").write_text(
        "".join(["text,label\n", *rows, "odd\n", "good,none\n" * 2])
    )
    (tmp_path / "dev.csv").write_text("".join(["text,label\n", *rows[:5]]))
    return tmp_path / "train.csv"


@pytest.fixture
def cfg(plain, raw):
    files = {
        "path": str(raw),
        "train": "train.csv",
        "validation": "dev.csv",
        "label_map": {"none": None},
    }
    return with_data(plain, **files, cache_dir=str(raw.parent / "cache"), max_bad_rows=1)


def with_data(cfg, **changes):
    return replace(cfg, data=replace(cfg.data, **changes))


def cache_of(cfg):
    return Path(cfg.data.cache_dir) / "records"


def hidden(cfg):
    return sorted(path.name for path in cache_of(cfg).glob(".*"))


def folders_of(cfg):
    return [path for path in cache_of(cfg).iterdir() if path.is_dir()]


def is_reused(cfg, made, words=None):
    """Whether the tables `made` are used again without a call of the tokenizer."""
    words = words or Words()
    return open_tables(cfg, words) == made and words.calls == []


def test_rows_are_tokenised_once_in_batches_and_found_again(cfg):
    words = Words()
    made = open_tables(cfg, words)
    assert words.calls == [("train", 1000), ("train", 200), ("validation", 5)]
    assert is_reused(cfg, made)
    assert made.folder.parent == cache_of(cfg)
    assert list(made.facts["splits"]) == ["train", "validation"]
    assert hidden(cfg) == []

    features, examples = made.features("train"), made.examples("train")
    kinds = features.features
    assert (kinds["input_ids"].feature.dtype, kinds["label"].dtype) == ("int32", "int64")
    assert len(features) == len(examples) == ROWS and features.cache_files  # mapped, not in memory
    for row in map(features.__getitem__, (0, 999, 1199)):
        example = examples[row["row"]]
        encoded = words.tokenizer(example["text"], truncation=True, max_length=SEQ_LEN)
        assert row["input_ids"] == encoded["input_ids"] and row["label"] == example["label"]
    assert examples.features["label"].names == ["n", "p"] and examples[3]["id"] == "3"
    kept = AutoTokenizer.from_pretrained(str(made.folder / "tokenizer"))
    assert kept.backend_tokenizer.truncation is None  # the next call would set it
    assert kept("good day").input_ids == Words().tokenizer("good day").input_ids


def test_facts_say_what_the_rows_are(cfg, raw):
    tables = open_tables(cfg, Words())
    facts, lengths = tables.facts, tables.lengths("train")
    assert (facts["kind"], facts["labels"]) == ("classify", ["n", "p"])
    assert facts["settings"] == Words().settings
    train = facts["splits"]["train"]
    texts = tables.examples("train")["text"]
    bad = [f"{raw}:{ROWS + 2}: 1 field where the header has 2"]
    wanted = {
        "rows": ROWS,
        "examples": ROWS,
        "label_counts": {"n": 400, "p": 800},
        "bad_rows": 1,
        "bad_examples": bad,
        "left_out": 2,
        "tokens": sum(map(len, tables.features("train")["input_ids"])),
        "padding_share": pytest.approx(1 - lengths.mean() / SEQ_LEN, abs=1e-6),
    }
    assert {name: train[name] for name in wanted} == wanted
    assert train["length_histogram"]["up_to"] == [4, 6, 8, 12, 16]
    assert train["length_histogram"]["counts"][-1] == (lengths > 12).sum()
    assert train["length_quantiles"]["longest"] == SEQ_LEN
    longer = sum(len(text.split()) > SEQ_LEN - 2 for text in texts)
    assert train["notes"]["truncated"] == longer


def test_a_label_without_rows_is_named_each_time(cfg, caplog):
    wanted = [
        "train has no row with the label q: it cannot be learnt",
        "validation has no row with the label q: it is not measured",
        "validation has only 5 examples: one answer moves a score by 20%; hold out at least 30",
    ]
    for calls in (3, 0):
        caplog.clear()
        words = Words()
        open_tables(with_data(cfg, labels=["n", "q", "p"]), words)
        assert caplog.messages == wanted and len(words.calls) == calls


def test_the_id_is_of_what_training_sees(cfg, raw):
    first = open_tables(cfg, Words())
    content = raw.read_text()
    others = [
        open_tables(with_data(cfg, max_train_examples=10), Words()),
        open_tables(with_data(cfg, validation=None), Words()),
        open_tables(with_data(cfg, labels=["p", "n"]), Words()),
        open_tables(with_data(cfg, label_map={"none": None, "n": "m", "p": "p"}), Words()),
        open_tables(cfg, Words(WORDS[::-1])),
    ]
    raw.write_text(content.replace("good", "rain"))  # of the same size
    others.append(open_tables(cfg, Words()))
    assert len({first.id, *(other.id for other in others)}) == 7 and first.folder.is_dir()
    raw.write_text(content)
    for same in (Words(), Words(version=2)):
        again = open_tables(cfg, same)
        assert again.id == first.id and again.folder != first.folder and same.calls


def test_the_id_is_the_same_wherever_and_however_the_rows_lie(cfg, raw):
    used = Words()
    used.tokenizer("good day", truncation=True, max_length=3)  # it keeps that
    first = open_tables(cfg, used)
    assert is_reused(with_data(cfg, num_workers=3, lengths=[8]), first)
    folder = raw.parent / "elsewhere"
    folder.mkdir()
    (folder / "dev.csv").write_bytes((raw.parent / "dev.csv").read_bytes())
    header, *lines = raw.read_text().splitlines(keepends=True)
    for number in range(3):
        (folder / f"part-{number}.csv").write_text(
            "".join([header, *lines[number * 401 : (number + 1) * 401]])
        )
    other = with_data(cfg, path=str(folder), train="part-*.csv", cache_dir=str(folder / "cache"))
    assert open_tables(other, Words()).id == first.id


def test_raw_data_that_changes_while_it_is_read_is_rejected(cfg, raw):
    words = Words()
    words.kind = replace(CLASSIFY_ROWS, read=lambda row: (raw.touch(), CLASSIFY_ROWS.read(row))[1])
    rejects("train.csv changed while it was being read; start again", open_tables, cfg, words)
    assert folders_of(cfg) == []


def test_tables_with_more_bad_rows_than_this_run_allows_are_rejected(cfg, raw):
    made = open_tables(cfg, Words())
    assert is_reused(with_data(cfg, max_bad_rows=7), made)
    says = f"train: 1 bad row, more than data.max_bad_rows=0 allows: {raw}:1202: 1 field"
    rejects(says, open_tables, with_data(cfg, max_bad_rows=0), words := Words())
    assert words.calls == []


def test_what_is_rejected_on_the_way_leaves_nothing(cfg):
    def no_room():
        raise OSError(28, "No space left on device")

    rejects(
        "cannot write .*: No space left on device; free some space",
        open_tables,
        cfg,
        Words(before=no_room),
    )
    assert folders_of(cfg) == []
    assert len(open_tables(cfg, Words()).features("train")) == ROWS


def test_names_of_splits_that_are_taken_are_rejected(cfg):
    for name in ("tokenizer", "train_examples", "../up"):
        rejects(
            "cannot be the name of a split",
            open_tables,
            with_data(cfg, more_validation={name: "x"}),
            Words(),
        )


@pytest.fixture
def three_ranks(monkeypatch):
    launch = {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**launch, "LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_one_rank_of_a_machine_prepares_the_others_wait_and_if_it_fails_another_one_does(
    tmp_path, three_ranks, monkeypatch
):
    lock, calls = tmp_path / "lock", []
    lock.write_text("another-launch old")
    together, another = threading.Barrier(3), threading.Event()

    def prepare():
        calls.append("called")
        check(len(calls) > 1, "3 bad rows")
        another.wait(0.2)  # time for another rank, which the lock keeps out
        return "folder"

    def rank(_):
        together.wait()
        return once_per_machine(lock, prepare)

    rejects("3 bad rows", once_per_machine, lock, prepare)
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(rank, range(3))] == ["folder"] * 3
    assert len(calls) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # files may have changed since
    assert once_per_machine(lock, prepare) == "folder"
    assert len(calls) == 3


def test_padding_is_counted_against_the_first_length_that_fits():
    lengths = np.array([4, 8, 9, 16])
    assert padding_share(lengths, [16]) == pytest.approx(1 - 37 / 64)
    assert padding_share(lengths, [8, 16]) == pytest.approx(1 - 37 / 48)
    assert length_histogram(lengths, 16) == {"up_to": [4, 6, 8, 12, 16], "counts": [1, 0, 1, 1, 1]}


def test_the_best_lengths_leave_the_least_padding():
    lengths = np.repeat([10, 30, 33, 100], [500, 300, 5, 20])
    assert best_lengths(lengths, 128, 1) == [128]
    best = best_lengths(lengths, 128, 3)
    assert best == [16, 32, 128]
    every = [[a, b, 128] for b in range(1, 128) for a in range(1, b) if a % 16 == b % 16 == 0]
    assert padding_share(lengths, best) == min(padding_share(lengths, some) for some in every)
    assert best_lengths(np.array([128]), 128, 3) == [128]


@pytest.fixture
def command(raw, capsys):
    tokenizer_of(WORDS).save_pretrained(raw.parent / "tokenizer")
    files = [
        "data.train=train.csv",
        "data.validation=dev.csv",
        "data.label_map={none: null}",
        "data.max_bad_rows=1",
    ]

    def run(*overrides):
        given = ["task=classify", "data=records", f"data.path={raw}", *files, *overrides]
        words = tuning(raw.parent / "run", raw.parent / "tokenizer", *given)
        return records.main(words), capsys.readouterr().out

    return run


def test_the_command_prepares_and_says_what_there_is(command, raw, tmp_path):
    code, said = command("seq_len=16", "data.lengths=[8]")
    folder = Path(said.split(": id ")[0])
    facts = json.loads((folder / "tables.json").read_bytes())
    notes = facts["splits"]["train"]["notes"]
    share = padding_share(Tables(folder, "", facts).lengths("train"), [8, 16])
    assert code == 0 and folder.parent == tmp_path / "cache" / "records"
    for words in (
        f": id {facts['id'][:12]}, classify, at most 16 tokens",
        "train: 1,200 examples, 1,200 rows of tokens",
        "n 400 (33.3%), p 800 (66.7%)",
        f"train: {notes['truncated']:.0f} of 1,200 rows are cut at 16 tokens: ",
        f"tokens: {notes['tokens_cut']:,.0f} of ",
        "1 bad row, 2 by data.label_map",
        "train.csv:1202: 1 field",
        f"in training at least {share:.1%} of the tokens are padding",
    ):
        assert words in said
