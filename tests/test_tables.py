"""Prepared examples: made once, found again, whole or not there, the same on all ranks of a machine and in S3."""

import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from running import eventually
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from train import cli, progress, records, tasks
from train.config import ColumnsConfig, Failure, InputError, QAConfig, TrainConfig
from train.data import once, raw_identity
from train.data import raw as raw_data
from train.data.table_facts import best_lengths, length_histogram, padding_share
from train.data.table_files import UNFINISHED, check_whole
from train.data.tables import open_tables
from train.storage import sha256_file, sha256_json
from train.tasks.featurize import QAFeaturizer
from train.tasks.finetune import lengths_up_to

WORDS = "good bad day sun rain very so and the not".split()
SEQ_LEN, ROWS = 16, 1200


def tokenizer_of(words):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]
    model = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


class Words:
    """A Featurizer; `calls` is what it was asked for."""

    kind = "classify"

    def __init__(self, words=WORDS, **settings):
        self.tokenizer, self.settings = tokenizer_of(words), {"seq_len": SEQ_LEN, "version": 1, **settings}
        self.calls, self.cut = [], {}

    def features(self, rows, indices, *, split):
        self.calls.append((split, len(indices)))
        ids = self.tokenizer(rows["text"], truncation=True, max_length=self.settings["seq_len"])["input_ids"]
        self.cut[split] = self.cut.get(split, 0) + sum(len(found) == SEQ_LEN for found in ids)
        lengths = [len(found) for found in ids]
        return {"input_ids": ids, "length": lengths, "second_at": lengths, "row": indices, "label": rows["label"]}

    def notes(self, split):
        return {"truncated": self.cut[split]}


class Source:
    """Stands in for train/data/raw.py: a split "train" out of the lines of data.path, whose first word is the label,
    and a small "validation". `reads` is how often it was read, `hashed` how
    often its content was looked at.
    """

    def __init__(self):
        self.reads, self.hashed, self.before = 0, 0, lambda: None

    def fingerprint(self, cfg, s3, scratch=None):
        self.hashed += 1
        about = [cfg.max_train_examples, cfg.labels, cfg.label_map]
        return sha256_json([sha256_file(Path(cfg.path)), *about])

    def read_raw(self, cfg, kind, s3, *, seed, scratch, unanswerable):
        self.reads += 1
        self.before()
        lines = [line.split(" ", 1) for line in Path(cfg.path).read_text().splitlines()]
        labels = sorted({label for label, _ in lines})
        columns = datasets.Features({"id": datasets.Value("string"), "text": datasets.Value("string")})
        columns["label"] = datasets.ClassLabel(names=labels)

        def table(name, lines):
            made = {"id": [f"{name}{n}" for n in range(len(lines))], "text": [text for _, text in lines]}
            made["label"] = [labels.index(label) for label, _ in lines]
            return datasets.Dataset.from_dict(made, features=columns)

        splits = {"validation": table("v", lines[:5]), "train": table("t", lines)}  # an order of their own
        none = {"bad_rows": 0, "examples": [], "left_out": 0}
        bad = {"bad_rows": 1, "examples": ["a.csv:7: no label"], "left_out": 2}
        return raw_data.Raw(splits, labels, {"train": bad, "validation": none})


@pytest.fixture
def source(monkeypatch):
    made = Source()
    monkeypatch.setattr(raw_identity, "fingerprint", made.fingerprint)
    monkeypatch.setattr(raw_data, "read_raw", made.read_raw)
    return made


@pytest.fixture(scope="module")
def plain():
    overrides = ["task=classify", "data=records", "data.path=x", "run_dir=run", "micro_batch_size=2", "max_steps=1"]
    return cli.load_config(TrainConfig, overrides)


@pytest.fixture
def cfg(plain, tmp_path):
    random = np.random.default_rng(0)
    lines = [f"{'pn'[n % 3 == 0]} {' '.join(random.choice(WORDS, random.integers(1, 20)))}" for n in range(ROWS)]
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(lines))
    return with_data(plain, path=str(path), cache_dir=str(tmp_path / "cache"), max_bad_rows=1)


def with_data(cfg, **changes):
    return replace(cfg, data=replace(cfg.data, **changes))


def hidden(cfg):
    return sorted(path.name for path in cache_of(cfg).glob(".*"))


def cache_of(cfg):
    return Path(cfg.data.cache_dir) / "records"


def spoil(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- made once and found again -------------------------------------------------------------------------------------


def test_rows_are_tokenised_once_in_batches_and_found_again(cfg, source):
    words = Words()
    made = open_tables(cfg, words)
    assert words.calls == [("validation", 5), ("train", 1000), ("train", 200)]
    again = open_tables(cfg, (fresh := Words()))
    assert (again, fresh.calls, source.reads) == (made, [], 1)
    assert made.folder == cache_of(cfg) / made.id[:24] and made.splits == ["validation", "train"]
    assert hidden(cfg) == []

    features, examples = made.features("train"), made.examples("train")
    assert features.features["input_ids"].feature.dtype == "int32" and features.features["label"].dtype == "int64"
    assert len(features) == len(examples) == ROWS and features.cache_files  # mapped, not in memory
    for row in (0, 999, 1199):
        text = examples[features[row]["row"]]["text"]
        assert features[row]["input_ids"] == words.tokenizer(text, truncation=True, max_length=SEQ_LEN)["input_ids"]
        assert features[row]["label"] == examples[row]["label"]
    assert examples.features["label"].names == ["n", "p"] and examples[3]["id"] == "t3"
    kept = AutoTokenizer.from_pretrained(str(made.folder / "tokenizer"))
    assert kept.backend_tokenizer.truncation is None  # the next call would set it
    assert kept("good day").input_ids == Words().tokenizer("good day").input_ids


def test_what_takes_long_is_said_meanwhile(cfg, source, monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    said = []

    def until_named(name):
        def is_named():
            said.append(capsys.readouterr().err)
            return name in "".join(said)

        eventually(is_named)

    class Slow(Words):
        def features(self, rows, indices, *, split):
            if split == "train":
                until_named("... tokenising train: ")
            return super().features(rows, indices, split=split)

    source.before = lambda: until_named("... comparing checksums of data.path=")
    tables = open_tables(cfg, Slow())
    assert len(tables.features("train")) == ROWS


def test_facts_say_what_the_rows_are(cfg, source):
    tables = open_tables(cfg, Words())
    facts = tables.facts
    assert (facts["kind"], facts["labels"], facts["settings"]) == ("classify", ["n", "p"], Words().settings)
    train, lengths = facts["splits"]["train"], tables.lengths("train")
    assert (train["rows"], train["examples"], train["label_counts"]) == (ROWS, ROWS, {"n": 400, "p": 800})
    assert (train["bad_rows"], train["bad_examples"], train["left_out"]) == (1, ["a.csv:7: no label"], 2)
    assert train["tokens"] == lengths.sum() == sum(map(len, tables.features("train")["input_ids"]))
    assert train["length_histogram"]["up_to"] == [4, 6, 8, 12, 16]
    assert train["length_histogram"]["counts"][-1] == (lengths > 12).sum()
    assert train["length_quantiles"]["longest"] == SEQ_LEN and train["notes"]["truncated"] == (lengths == 16).sum()
    assert train["padding_share"] == pytest.approx(1 - lengths.mean() / SEQ_LEN, abs=1e-6)
    assert facts["splits"]["validation"]["bad_rows"] == 0


@pytest.mark.parametrize("change", ["content", "seed", "settings", "tokenizer", "subset"])
def test_what_decides_the_rows_is_in_the_id(cfg, source, change):
    first = open_tables(cfg, Words())
    if change == "content":
        path = Path(cfg.data.path)
        path.write_text(path.read_text() + "\np one more")
    other_words = [*WORDS[::-1]] if change == "tokenizer" else WORDS
    other = {
        "seed": replace(cfg, seed=1),
        "subset": with_data(cfg, max_train_examples=10),
    }.get(change, cfg)
    second = open_tables(other, Words(other_words, **({"version": 2} if change == "settings" else {})))
    assert second.id != first.id and source.reads == 2
    assert first.folder.is_dir()


@pytest.mark.parametrize(
    "same", [{"num_workers": 3}, {"lengths": [8]}, {"prefetch": 9}], ids=lambda change: next(iter(change))
)
def test_what_does_not_decide_them_is_not(cfg, source, same):
    used = Words()
    used.tokenizer("good day", truncation=True, max_length=3)  # it keeps that
    assert open_tables(with_data(cfg, **same), used).id == open_tables(cfg, Words()).id
    assert source.reads == 1


DAMAGES = ("no tables.json", "cut tables.json", "facts", "cut rows", "no rows", "bit", "tokenizer")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_made_anew(cfg, source, damage):
    made = open_tables(cfg, Words())
    rows = made.folder / "train" / "data-00000-of-00001.arrow"
    wanted = sha256_file(rows)
    if damage in ("no tables.json", "no rows"):
        (made.folder / "tables.json" if damage == "no tables.json" else rows).unlink()
    elif damage == "facts":
        change_facts(made.folder, max_length=10**6)
    elif damage.startswith("cut"):
        os.truncate(rows if damage == "cut rows" else made.folder / "tables.json", 100)
    else:
        spoil(rows if damage == "bit" else made.folder / "tokenizer" / "tokenizer.json")
    again = open_tables(cfg, Words())
    assert source.reads == 2 and again == made and sha256_file(rows) == wanted
    assert hidden(cfg) == []


def change_facts(folder, **changed):
    """In tables.json; None removes a key."""
    facts = {**json.loads((folder / "tables.json").read_bytes()), **changed}
    (folder / "tables.json").write_text(json.dumps({name: value for name, value in facts.items() if value is not None}))


def test_a_damaged_folder_stays_until_another_takes_its_place(cfg, source):
    """Another run may be reading it."""
    made = open_tables(cfg, Words())
    spoil(made.folder / "train" / "data-00000-of-00001.arrow")
    there = []
    source.before = lambda: there.append((made.folder / "train").is_dir())
    assert open_tables(cfg, Words()) == made and source.reads == 2
    assert there == [True]


def test_tables_of_an_earlier_version_are_used_without_a_checksum_of_their_facts(cfg, source):
    made = open_tables(cfg, Words())
    change_facts(made.folder, sha256=None)
    assert open_tables(cfg, Words()).id == made.id and source.reads == 1


def test_without_verify_only_lengths_are_compared(cfg, source):
    made = open_tables(cfg, Words())
    spoil(made.folder / "train" / "data-00000-of-00001.arrow")
    assert open_tables(with_data(cfg, verify=False), Words()) == made and source.reads == 1
    with pytest.raises(InputError, match="data-00000-of-00001.arrow is damaged: its sha256"):
        check_whole(made.folder, made.facts, checksums=True)


# ---- without reading the raw data again ----------------------------------------------------------------------------


def test_raw_files_that_have_not_changed_are_not_read_again(cfg, source):
    made = open_tables(cfg, Words())
    assert open_tables(cfg, Words()) == made and source.hashed == 1
    path = Path(cfg.data.path)
    content = path.read_text()
    path.write_text(content.replace("good", "rain"))  # of the same size
    other = open_tables(cfg, Words())
    assert other.id != made.id and (source.hashed, source.reads) == (2, 2)
    path.write_text(content)  # another time, the same content
    assert open_tables(cfg, Words()) == made and (source.hashed, source.reads) == (3, 2)
    assert open_tables(with_data(cfg, labels=["n", "p"]), Words()).id != made.id
    for note in (cache_of(cfg) / "index").iterdir():
        note.write_text("spoilt")
    assert open_tables(cfg, Words()) == made and source.reads == 3


def test_raw_data_that_changes_while_it_is_read_is_not_remembered(cfg, source):
    source.before = lambda: Path(cfg.data.path).write_text("p good\nn bad")
    made = open_tables(cfg, Words())
    assert not (cache_of(cfg) / "index").exists()
    source.before = lambda: None
    assert open_tables(cfg, Words()).id != made.id and source.reads == 2


def test_prepared_data_outlives_the_raw(cfg, source, caplog):
    made = open_tables(cfg, Words())
    Path(cfg.data.path).unlink()
    assert open_tables(cfg, Words()) == made and source.hashed == 1
    assert f"data.path={cfg.data.path} is gone; going on with what was prepared from it" in caplog.text
    for other, words in ((with_data(cfg, labels=["n", "p"]), Words()), (cfg, Words(version=2))):
        with pytest.raises(FileNotFoundError):  # as reading says it: here the stand-in
            open_tables(other, words)
    (made.folder / "tables.json").unlink()
    with pytest.raises(FileNotFoundError):
        open_tables(cfg, Words())


def test_files_in_s3_are_not_fetched_to_find_what_was_made_of_them(cfg, bucket):
    bucket.put("set/train.csv", csv_of(CLASSES))
    there = with_data(cfg, path=bucket.location("set/train.csv"), max_bad_rows=0)
    there = replace(there, s3=bucket.config())
    made = open_tables(there, Words())
    bucket.proxy.set()
    assert open_tables(there, Words()) == made
    assert not [request for request in bucket.proxy.requests() if request.method == "GET"]
    bucket.put("set/train.csv", csv_of(CLASSES[:-1]))
    assert open_tables(there, Words()).id != made.id


def test_tables_with_more_bad_rows_than_this_run_allows_are_refused(cfg, source):
    made = open_tables(cfg, Words())
    assert open_tables(with_data(cfg, max_bad_rows=7), Words()) == made and source.hashed == 1
    with pytest.raises(InputError, match="train: 1 bad rows, data.max_bad_rows=0 are allowed: a.csv:7: no label"):
        open_tables(with_data(cfg, max_bad_rows=0), Words())
    assert source.reads == 1


# ---- nothing half-written ------------------------------------------------------------------------------------------


def test_what_is_refused_on_the_way_leaves_nothing(cfg, source):
    words = Words()
    words.notes = lambda split: no_room() if split == "train" else {}

    def no_room():
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="cannot write .*: No space left on device; free some space"):
        open_tables(cfg, words)
    assert list(cache_of(cfg).iterdir()) == []
    assert len(open_tables(cfg, Words()).features("train")) == ROWS


def test_the_first_of_two_that_prepare_the_same_is_used_by_both(cfg, source):
    theirs = []

    def another():
        source.before = lambda: None
        theirs.append(open_tables(cfg, Words()))

    source.before = another
    mine = open_tables(cfg, Words())
    assert source.reads == 2 and [mine] == theirs
    assert mine.features("train")[0] and hidden(cfg) == []


def test_what_killed_processes_left_is_removed(cfg, source):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    name = once.owner_name(gone.pid)
    gone.wait()
    root = cache_of(cfg)
    alive = once.owner_name(os.getpid())
    for owner in (name, alive, name.replace(platform.node(), "elsewhere")):
        (root / f"{UNFINISHED}{owner}-1234").mkdir(parents=True)
    open_tables(cfg, Words())
    assert hidden(cfg) == sorted(
        [f"{UNFINISHED}{alive}-1234", f"{UNFINISHED}elsewhere{name[len(platform.node()) :]}-1234"]
    )


def test_names_of_splits_that_are_taken_are_refused(cfg, source):
    for name in ("tokenizer", "train_examples", "../up"):
        with pytest.raises(InputError, match="cannot be the name of a split"):
            open_tables(with_data(cfg, more_validation={name: "x"}), Words())


# ---- once per machine ----------------------------------------------------------------------------------------------


class Ranks:
    """Processes with the same parent, as torchrun's are."""

    def __init__(self, cfg, source):
        self.cfg, self.source, self.context = cfg, source, multiprocessing.get_context("fork")
        self.answers, self.processes = self.context.Queue(), []

    def start(self, rank, restarts=0):
        process = self.context.Process(target=self.run, args=(rank, restarts))
        process.start()
        self.processes.append(process)
        return process

    def run(self, rank, restarts):
        os.environ |= {"WORLD_SIZE": "3", "RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        os.environ |= {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        words = Words()
        try:
            tables = open_tables(self.cfg, words)
            told = (tables.id, len(tables.features("train")))
        except (InputError, Failure) as error:
            told = (type(error).__name__, str(error))
        self.answers.put((rank, self.source.reads, len(words.calls), *told))

    def wait(self, count):
        found = sorted(self.answers.get(timeout=60) for _ in range(count))
        for process in self.processes:
            process.join()
        return found


@pytest.fixture
def ranks(cfg, source):
    made = Ranks(cfg, source)
    yield made
    for process in made.processes:
        process.kill()
        process.join()


def test_one_rank_of_a_machine_prepares_and_the_others_wait(ranks):
    ranks.source.before = lambda: time.sleep(0.3)  # others have looked by then
    for rank in (2, 1, 0):
        ranks.start(rank)
    (_, *first), (_, *second), (_, *third) = ranks.wait(3)
    assert first[:2] == [1, 3] and second[:2] == third[:2] == [0, 0]
    assert first[2:] == second[2:] == third[2:] and first[3] == ROWS


def test_all_ranks_are_refused_alike(ranks):
    def refuse():
        raise InputError("train: 3 bad rows")

    ranks.source.before = refuse
    for rank in (0, 1):
        ranks.start(rank)
    assert [told[3:] for told in ranks.wait(2)] == [("InputError", "train: 3 bad rows")] * 2
    ranks.source.before = lambda: None  # mended, and torchrun starts them again
    for rank in (0, 1):
        ranks.start(rank, restarts=1)
    assert [told[4] for told in ranks.wait(2)] == [ROWS, ROWS]


def test_a_rank_whose_first_one_died_does_not_wait_for_ever(ranks):
    ranks.source.before = lambda: os._exit(9)
    ranks.start(0)
    ranks.start(1)
    (told,) = ranks.wait(1)
    assert told[3:] == ("Failure", "rank 0 of this machine ended while it prepared the data; its words are above")


def test_a_rank_whose_first_one_never_comes_gives_up(ranks, monkeypatch):
    monkeypatch.setattr(once, "BEGINS_WITHIN_S", 0.0)
    ranks.start(1)
    ((*_, kind, words),) = ranks.wait(1)
    assert kind == "Failure" and "has not begun to prepare the data" in words


def test_words_of_launches_that_are_gone_are_removed(ranks):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    name = once.owner_name(gone.pid)
    gone.wait()
    root = cache_of(ranks.cfg)
    root.mkdir(parents=True)
    (root / f".launch-{name}-0-abc").write_text("{}")
    ranks.start(0)
    ranks.wait(1)
    (left,) = hidden(ranks.cfg)
    assert left.startswith(f".launch-{once.owner_name(os.getpid())}-0-")


# ---- saved and read back -------------------------------------------------------------------------------------------


@pytest.fixture
def saved(cfg, source, tmp_path):
    made = open_tables(with_data(cfg, save_to=str(tmp_path / "saved")), Words())
    assert source.reads == 1
    return made


def from_saved(cfg, tmp_path, **changes):
    return with_data(cfg, path=str(tmp_path / "saved"), **changes)


def test_what_was_saved_is_used_without_the_raw_data(cfg, source, saved, tmp_path):
    Path(cfg.data.path).unlink()
    words = Words()
    found = open_tables(from_saved(cfg, tmp_path), words)
    assert (found.id, found.facts, found.folder) == (saved.id, saved.facts, tmp_path / "saved")
    assert (source.reads, words.calls) == (1, [])
    plain = datasets.load_from_disk(str(tmp_path / "saved" / "train"))
    assert plain[7] == saved.features("train")[7]


CLASSES = [{"text": f"good day {WORDS[n % 9]} {n}", "label": "np"[n % 2]} for n in range(60)]
QUESTIONS = [
    {"id": f"q{n}", "question": "so ?", "context": f"rain {n}", "answers": {"text": ["rain"], "answer_start": [0]}}
    for n in range(60)
]


def csv_of(rows):
    return "".join(f"{row['text']},{row['label']}\n" for row in [{"text": "text", "label": "label"}, *rows]).encode()


def jsonl_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def squad_of(rows):
    answers = [{"text": "rain", "answer_start": 0}]
    return json.dumps(
        {"data": [{"paragraphs": [{"context": row["context"], "qas": [row | {"answers": answers}]} for row in rows]}]}
    ).encode()


@pytest.mark.parametrize(
    ("form", "suffix", "content", "columns"),
    [
        ("csv", "csv", csv_of(CLASSES), {}),
        ("jsonl", "json", jsonl_of(CLASSES), {}),
        ("squad", "json", squad_of(QUESTIONS), {}),
        ("hub", "jsonl", jsonl_of(QUESTIONS), {"id": "id"}),
    ],
)
def test_saved_data_of_every_format_is_read_back_by_its_path_alone(cfg, tmp_path, form, suffix, content, columns):
    raw, target = tmp_path / "raw", tmp_path / "saved"
    raw.mkdir()
    for name in ("train", "validation"):
        (raw / f"{name}.{suffix}").write_bytes(content if name == "train" else content.replace(b" 7", b" 70"))
    train, validation = ("train", "validation") if form == "hub" else (f"train.{suffix}", f"validation.{suffix}")
    files = {"train": train, "validation": validation, "columns": ColumnsConfig(**columns)}
    cfg = with_data(cfg, path=str(raw), format=form, **files)
    if form in ("csv", "jsonl"):
        featurizer = Words()
    else:
        pairs = tokenizer_of(WORDS)
        pairs.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        featurizer = QAFeaturizer(pairs, seq_len=SEQ_LEN, task=QAConfig(stride=2, max_question_tokens=4))
    made = open_tables(with_data(cfg, save_to=str(target)), featurizer)
    shutil.rmtree(raw)
    shutil.rmtree(cache_of(cfg))
    found = open_tables(with_data(cfg, path=str(target)), featurizer)
    assert (found.facts, found.folder) == (made.facts, target)
    assert {split: len(found.features(split)) for split in found.splits} == {"train": 60, "validation": 60}


def test_saving_twice_is_once_and_over_something_else_is_refused(cfg, source, saved, tmp_path):
    target = tmp_path / "saved"
    before = (target / "tables.json").stat().st_mtime_ns
    open_tables(with_data(cfg, save_to=str(target)), Words())
    assert (target / "tables.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="saved holds other prepared data; choose another folder"):
        open_tables(with_data(replace(cfg, seed=1), save_to=str(target)), Words())
    with pytest.raises(
        InputError, match=r"holds something else \(cache, run.*, saved.*choose an empty folder|texts.txt"
    ):
        open_tables(with_data(cfg, save_to=str(tmp_path)), Words())
    (target / "tables.json").unlink()  # a save that was killed goes on
    open_tables(with_data(cfg, save_to=str(target)), Words())
    assert open_tables(from_saved(cfg, tmp_path), Words()).facts == saved.facts


def test_saved_data_of_other_settings_is_refused(cfg, source, saved, tmp_path):
    there = from_saved(cfg, tmp_path)
    cases = [
        (there, Words(version=2), "was prepared with version=1, this run has 2"),
        (there, Words(WORDS[::-1]), "was prepared with another tokenizer .* than the model's"),
        (with_data(there, labels=["p", "n"]), Words(), r"labels=\['n', 'p'\], this run has \['p', 'n'\]"),
        (with_data(there, max_train_examples=9), Words(), "max_train_examples=None, this run has 9"),
        (with_data(there, more_validation={"other": "x"}), Words(), "has no split other"),
    ]
    for settings, words, message in cases:
        with pytest.raises(InputError, match=message):
            open_tables(settings, words)
    words = Words()
    words.kind = "qa"
    with pytest.raises(InputError, match="was prepared for task=classify, not qa"):
        open_tables(there, words)
    assert open_tables(with_data(there, labels=["n", "p"]), Words()).id == saved.id


def test_damaged_saved_data_is_refused(cfg, source, saved, tmp_path):
    spoil(tmp_path / "saved" / "train" / "data-00000-of-00001.arrow")
    with pytest.raises(InputError, match="train/data-00000-of-00001.arrow is damaged"):
        open_tables(from_saved(cfg, tmp_path), Words())
    facts = tmp_path / "saved" / "tables.json"
    facts.write_text(facts.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(InputError, match="of another version of this program; prepare the data again"):
        open_tables(from_saved(cfg, tmp_path), Words())


def test_saved_data_whose_facts_were_changed_is_refused(cfg, source, saved, tmp_path):
    change_facts(tmp_path / "saved", labels=["good", "bad"])
    with pytest.raises(InputError, match="tables.json is damaged"):
        open_tables(from_saved(cfg, tmp_path), Words())


def test_files_outside_the_folder_are_not_written(cfg, source, saved, tmp_path):
    path = tmp_path / "saved" / "tables.json"
    facts = json.loads(path.read_text())
    facts["files"]["../evil"] = {"bytes": 1, "sha256": "0"}
    del facts["sha256"]  # as in earlier versions
    path.write_text(json.dumps(facts))
    with pytest.raises(InputError, match="is not a path below a folder"):
        open_tables(from_saved(cfg, tmp_path), Words())


def test_prepared_data_goes_to_s3_and_comes_back(cfg, source, bucket, tmp_path):
    place = bucket.location("prepared/tweets")
    made = open_tables(replace(with_data(cfg, save_to=place), s3=bucket.config()), Words())
    assert bucket.keys("prepared/tweets/tables.json")
    there = replace(with_data(cfg, path=place, cache_dir=str(tmp_path / "other")), s3=bucket.config())
    found = open_tables(there, Words())
    assert found.facts == made.facts and found.folder.is_relative_to(tmp_path / "other")
    assert found.features("train")[:] == made.features("train")[:] and source.reads == 1
    key = "prepared/tweets/train/data-00000-of-00001.arrow"
    content = bucket.get(key)
    bucket.put(key, content[:-1] + b"x")
    assert open_tables(there, Words()) == found  # from the cache
    shutil.rmtree(found.folder)
    with pytest.raises(InputError, match=f"{key} is damaged: its sha256"):
        open_tables(there, Words())
    assert list(found.folder.parent.iterdir()) == []


# ---- figures -------------------------------------------------------------------------------------------------------


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


# ---- python -m train.records ---------------------------------------------------------------------------------------


@pytest.fixture
def command(cfg, source, monkeypatch, capsys):
    def build(cfg):
        words = Words()
        lengths = lengths_up_to(words.settings["seq_len"], cfg.data.lengths)
        return SimpleNamespace(tables=open_tables(cfg, words), lengths=lengths)

    def run(*overrides):
        monkeypatch.setattr(tasks, "build_task", build)
        plain = ["task=classify", "data=records", "run_dir=none", "micro_batch_size=2", "max_steps=1"]
        there = [f"data.path={cfg.data.path}", f"data.cache_dir={cfg.data.cache_dir}", "data.max_bad_rows=1"]
        monkeypatch.setattr(sys, "argv", ["records", *plain, *there, *overrides])
        return records.main(), capsys.readouterr()

    return run


def test_the_command_prepares_and_says_what_there_is(command, cfg, tmp_path):
    code, told = command(f"data.save_to={tmp_path / 'saved'}")
    tables = open_tables(cfg, Words())
    assert code == 0 and (tmp_path / "saved" / "tables.json").is_file()
    for words in (
        f"{tables.folder}: id {tables.id[:12]}, classify, at most 16 tokens",
        "train: 1,200 examples, 1,200 rows of tokens",
        "n 400 (33.3%), p 800 (66.7%)",
        f"truncated: {tables.facts['splits']['train']['notes']['truncated']}",
        "1 bad rows, 2 by data.label_map",
        "a.csv:7: no label",
        f"padding   {padding_share(tables.lengths('train'), [16]):.1%} of batches of 16 tokens",
        f"saved to {tmp_path / 'saved'}",
    ):
        assert words in told.out
    assert "data.lengths=" not in told.out  # nothing shorter would help


def test_the_command_suggests_lengths_that_save_much(command, monkeypatch):
    monkeypatch.setitem(Words.__init__.__globals__, "SEQ_LEN", 128)
    _, told = command()
    assert "data.lengths=[16,32,128] would compute 8" in told.out
    _, told = command("data.lengths=[16,32,128]")
    assert "data.lengths=" not in told.out and "batches of 16 or 32 or 128 tokens" in told.out


def test_the_command_refuses_what_is_not_records(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["records", "experiment=demo", "data.path=nowhere"])
    assert records.main() == 2
    assert "learns from shards" in capsys.readouterr().err
