"""Preparation in parts: over jobs and processes, to disk and to S3, killed, merged and rejected."""

import gzip
import json
import multiprocessing
import os
import shutil
import signal

import pytest
from rejections import rejects
from running import prepare_config, prepare_here
from services.fault_proxy import Fault
from test_prepare import content
from test_prepare import rejected as prepare_rejects

from train.config import Failure
from train.data.shards.manifest import check_files, read_manifest
from train.data.text import corpus_files, processes, tokenizer
from train.data.text.documents import CorpusPart
from train.data.text.preparation import state_name
from train.storage.folders import open_folder
from train.tools import prepare

SMALL = "rows_per_shard=16"


@pytest.fixture(scope="module")
def ready(prepared):
    """A tokenizer that need not be trained."""
    return f"tokenizer.pretrained={prepared / 'tokenizer'}"


@pytest.fixture(scope="module")
def in_three(tmp_path_factory, corpus, ready):
    """Three parts, by three jobs, not merged. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("parts") / "out"
    for number in (3, 1, 2):  # in any order
        assert prepare_here(folder, corpus, SMALL, ready, f"part={number}/3") is None
    return folder


@pytest.fixture
def parts(in_three, tmp_path):
    return shutil.copytree(in_three, tmp_path / "copy")


def merged(folder, corpus, *overrides):
    return prepare_here(folder, corpus, SMALL, *overrides, "merge=true")


def rejected(folder, corpus, *overrides):
    return prepare_rejects(folder, corpus, SMALL, *overrides)


def test_merged_parts_are_a_whole_preparation(parts, corpus, ready, shards):
    assert not (parts / "manifest.json").exists()
    manifest = merged(parts, corpus, ready)
    assert manifest == read_manifest(parts)
    check_files(parts, manifest, checksums=True)
    assert not list(parts.glob("part-*"))
    whole = read_manifest(shards)
    near = {name: manifest.counts[name] for name in ("source_bytes", "validation_pairs")}
    assert manifest.counts == {**whole.counts, **near}
    assert near == pytest.approx({name: whole.counts[name] for name in near}, abs=10)
    names = [shard.file for shard in manifest.splits["train"]]
    assert names[0] == "train-1of3-00000.safetensors" and names == sorted(names)
    # a part loses its last partial sequence, as a whole preparation does
    for split in (
        "train",
        "validation",
    ):
        assert whole.rows(split) - 3 <= manifest.rows(split) <= whole.rows(split)


@pytest.fixture
def four_parts(monkeypatch):
    """What is read of a corpus beside each other, as if it were large."""
    monkeypatch.setattr(corpus_files, "PART_BYTES", 1)
    monkeypatch.setattr(prepare, "MOST_PARTS", 4)


def as_files(folder, corpus, kind):
    """The corpus as files of a kind; those that are read from their beginning alone are of several sizes."""
    documents = corpus.read_text().split("\n\n")
    folder.mkdir()
    for number, (first, last) in enumerate([(0, 50), (50, 60), (60, 90), (90, 100), (100, 120)]):
        rows, name = documents[first:last], f"{number}.{kind}"
        if kind == "txt.gz":
            (folder / name).write_bytes(gzip.compress("\n\n".join(rows).encode(), mtime=0))
        elif kind == "csv":
            (folder / name).write_text("text\n" + "".join(f'"{text}"\n' for text in rows))
        else:
            (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return folder, {"txt.gz": "text"}.get(kind, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_parts"), [("txt", 4), ("jsonl", 4), ("txt.gz", 4), ("csv", 4)]
)
def test_any_number_of_processes_makes_the_same_bytes(
    corpus, ready, tmp_path, kind, num_parts, four_parts
):
    """Files that are read from their beginning alone are not shared."""
    path, source = (
        (corpus, "text") if kind == "txt" else as_files(tmp_path / "files", corpus, kind)
    )
    found = []
    for number in (1, 2, 3):
        output = tmp_path / str(number)
        given = (SMALL, ready, f"corpus={source}", f"processes={number}")
        assert prepare_here(output, path, *given).counts["documents"] == 120
        found.append(content(output))
    assert found[1:] == found[:-1]
    parts = {name.split("-")[1] for name in found[0] if name.startswith("train-")}
    assert len(parts) > 1 and all(part.endswith(f"of{num_parts}") for part in parts)


def test_jobs_make_the_same_bytes_as_processes(corpus, tmp_path, four_parts):
    by_processes = prepare_here(tmp_path / "processes", corpus, SMALL, "processes=2")
    output = tmp_path / "jobs"
    for job, states in (("2/2", [2, 3]), ("1/2", [0, 1, 2, 3])):
        assert prepare_here(output, corpus, SMALL, f"part={job}", "processes=2") is None
        assert sorted(path.name for path in output.glob("part-*")) == [
            state_name(CorpusPart(n, 4)) for n in states
        ]
    assert merged(output, corpus) == by_processes
    assert content(output) == content(tmp_path / "processes")
    assert len(content(output)) > 8


def test_finished_parts_are_not_done_twice(parts, corpus, ready):
    before = {path: path.stat().st_mtime_ns for path in parts.rglob("*")}
    prepare_here(parts, corpus, SMALL, ready, "part=2/3")
    assert {path: path.stat().st_mtime_ns for path in parts.rglob("*")} == before
    merged(parts, corpus, ready)
    before = {path: path.stat().st_mtime_ns for path in parts.rglob("*")}
    assert prepare_here(parts, corpus, SMALL, ready, "part=2/3") == read_manifest(parts)
    assert merged(parts, corpus, ready) == read_manifest(parts)
    assert {path: path.stat().st_mtime_ns for path in parts.rglob("*")} == before


def test_the_tokenizer_that_is_published_first_is_everybodys(
    corpus, tmp_path, prepared, monkeypatch
):
    """While one job trains, another publishes its own."""
    output, train = tmp_path / "out", tokenizer.train_tokenizer
    theirs = tokenizer.load_tokenizer(str(prepared / "tokenizer"))

    def overtaken(*arguments, **settings):
        tokenizer.publish_tokenizer(theirs, open_folder(str(output), cfg.s3))
        return train(*arguments, **{**settings, "vocab_size": 100})

    monkeypatch.setattr(tokenizer, "train_tokenizer", overtaken)
    cfg = prepare_config(output, corpus, SMALL, "part=1/2")
    prepare.prepare(cfg)
    published = (output / "tokenizer" / "tokenizer.json").read_bytes()
    assert published == (prepared / "tokenizer" / "tokenizer.json").read_bytes()
    prepare_here(output, corpus, SMALL, "part=2/2")
    assert merged(output, corpus).tokenizer == read_manifest(prepared).tokenizer


def test_missing_parts_are_named(parts, corpus, ready, tmp_path):
    (parts / state_name(CorpusPart(1, 3))).unlink()
    message = rejected(parts, corpus, ready, "merge=true")
    assert "not finished: part 2/3; part=2/3 continues the first" in message
    assert len(list(parts.glob("train-*"))) > 5  # nothing was taken back
    assert "holds no parts to merge" in rejected(tmp_path / "out", corpus, "merge=true")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_changed_between_the_parts_is_noticed(parts, corpus, ready):
    published = parts / "tokenizer" / "tokenizer.json"
    published.write_text(published.read_text().replace("▁", "_"))
    (parts / state_name(CorpusPart(2, 3))).unlink()
    prepare_here(parts, corpus, SMALL, ready, "part=3/3")
    assert "another tokenizer made part 1/3, part 2/3;" in rejected(
        parts, corpus, ready, "merge=true"
    )


def test_a_damaged_state_and_one_of_another_preparation_are_named(parts, corpus, ready):
    path = parts / state_name(CorpusPart(0, 3))
    state = json.loads(path.read_text())
    path.write_text("{")
    assert f"{path} is damaged" in rejected(parts, corpus, ready, "part=1/3")
    path.write_text(json.dumps({**state, "identity": "other"}))
    assert f"{path} is from a preparation with other settings" in rejected(
        parts, corpus, ready, "merge=true"
    )


def test_the_error_of_one_process_is_one_line_and_stops_the_others(
    corpus, ready, tmp_path, four_parts
):
    (tmp_path / "bad.txt").write_bytes(corpus.read_bytes() + b"\n\n\xff")
    assert "byte 0xff is not utf-8" in rejected(
        tmp_path / "out", tmp_path / "bad.txt", ready, "processes=2"
    )
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_is_named_and_the_same_command_continues(
    corpus, ready, tmp_path, monkeypatch, four_parts
):
    completed = processes.as_completed

    def killing(futures):
        for child in multiprocessing.active_children()[:1]:
            os.kill(child.pid, signal.SIGKILL)
        return completed(futures)

    cfg = prepare_config(tmp_path / "out", corpus, SMALL, ready, "processes=2")
    monkeypatch.setattr(processes, "as_completed", killing)
    rejects(
        r"a process was killed \(out of memory\?\); the same command",
        prepare.prepare,
        cfg,
        error=Failure,
    )
    assert not multiprocessing.active_children()
    monkeypatch.setattr(processes, "as_completed", completed)
    assert prepare.prepare(cfg) == read_manifest(tmp_path / "out")


def in_bucket(bucket, prefix):
    """What a run reads, of a preparation in S3."""
    result = {key.removeprefix(f"{prefix}/"): bucket.get(key) for key in bucket.keys(f"{prefix}/")}
    others = [
        name
        for name in result
        if not name.startswith(("source.json", "tokenizer/tokenizer_config"))
    ]
    return {name: result[name] for name in sorted(others)}


@pytest.fixture(scope="module")
def local(tmp_path_factory, corpus, ready):
    folder = tmp_path_factory.mktemp("local") / "out"
    prepare_here(folder, corpus, SMALL, ready)
    return folder


def test_a_preparation_in_s3_is_that_on_disk_and_its_manifest_comes_last(
    bucket, corpus, ready, local
):
    manifest = prepare_here(bucket.location("a/b"), corpus, SMALL, ready, *bucket.overrides())
    assert in_bucket(bucket, "a/b") == content(local)
    assert manifest == read_manifest(local)
    written = [
        request.path.split("/")[-1] for request in bucket.proxy.requests("^(PUT|POST|DELETE)")
    ]
    assert written[0] == "source.json" and written[-2:] == [
        "manifest.json",
        "part-1of1.json",
    ]


def test_a_bucket_that_may_not_be_written_to_is_rejected_before_any_work(
    bucket, corpus, ready, monkeypatch
):
    bucket.proxy.set(Fault("status", match="PUT", code=403, error="AccessDenied"))
    monkeypatch.setattr(prepare, "vocabulary_of", None)  # would be the first work
    assert "no permission to write" in rejected(
        bucket.location("out"), corpus, ready, *bucket.overrides()
    )
    assert not bucket.keys("out/")
