"""Files that others may have written: no name leads out of its folder, and what cannot be is rejected in one line."""

import json
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from hostile import changed, names, quick
from hypothesis import given
from hypothesis import strategies as st
from rejections import rejects
from safetensors.numpy import save
from streaming import upload

from train.checkpoints.manifest import Damaged, Manifest, OtherVersion
from train.config import InputError
from train.data.shards.format import ShardSet, map_tensors
from train.data.shards.manifest import parse_manifest, read_manifest
from train.run.saved import read_config
from train.storage.checksums import sealed
from train.storage.folders import LocalFolder, canonical_json, sha256_bytes
from train.storage.foreign import MOST_BYTES, open_inside
from train.storage.schema import BadContent, FileName, RelativePath
from train.tools import shards as shards_tool

ROOT = Path("/a/folder")


def is_one_line(error):
    text = str(error)
    return bool(text) and text.isprintable() and len(text) < 500


# ---- names ---------------------------------------------------------------------------------------------------------


@quick
@given(names)
def test_no_accepted_name_leads_out_of_its_folder(name):
    for kind in (FileName, RelativePath):
        try:
            accepted = kind(name)
        except BadContent as error:
            assert is_one_line(error)
            continue
        path = ROOT / accepted
        assert path.resolve() == path and path.is_relative_to(ROOT) and path != ROOT
        assert kind is RelativePath or path.parent == ROOT
        assert not any(part.startswith((".", "-")) for part in path.relative_to(ROOT).parts)


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "a/../../out.txt"])
def test_a_local_folder_neither_reads_nor_writes_nor_removes_beside_itself(tmp_path, name):
    folder = LocalFolder(tmp_path / "in" / "deep")
    victim = tmp_path / "out.txt"
    folder.path.mkdir(parents=True)
    writes = (lambda it: folder.write(it, b"x"), lambda it: folder.create(it, b"x"))
    for act in (folder.read, folder.size, folder.remove, *writes):
        with pytest.raises(BadContent):
            act(name)
    assert not victim.exists()


@pytest.fixture
def folder(tmp_path):
    """A folder that somebody has put together, beside a private file."""
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.path.relpath(path))  # the length of its name is limited


NOT_READ = {
    "a link out": (lambda path: path.symlink_to("../secret"), "is a link that leads out of"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "a pipe": (os.mkfifo, "it is a pipe"),
    "a socket": (bound_socket, "it is a socket"),
    "a folder": (Path.mkdir, "it is a folder"),
    "a large file": (
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), MOST_BYTES + 1),
        "more than",
    ),
}


@pytest.mark.parametrize("kind", NOT_READ)
def test_only_regular_files_of_a_folder_are_read(folder, kind):
    make, says = NOT_READ[kind]
    make(folder / "config.yaml")
    rejects(says, LocalFolder(folder).read, "config.yaml")
    rejects(says, read_config, LocalFolder(folder))
    if kind == "a link out":
        rejects(says, LocalFolder(folder).open, "config.yaml")


def test_links_inside_a_folder_and_to_blobs_of_the_hubs_cache_are_read(tmp_path, folder):
    (folder / "a").write_text("a")
    (folder / "link").symlink_to("a")
    (tmp_path / "snapshots/1").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/2").write_text("b")
    (tmp_path / "snapshots/1/link").symlink_to("../../blobs/2")
    (tmp_path / "to_run").symlink_to("run")  # a path that the user typed
    places = (folder, tmp_path / "snapshots/1", tmp_path / "to_run")
    assert [LocalFolder(place).read("link") for place in places] == [b"a", b"b", b"a"]
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/a").write_text("c")
    (folder / "checkpoints").symlink_to("../disk")
    assert LocalFolder(folder).read("checkpoints/a") == b"c"
    (tmp_path / "disk/b").symlink_to("../secret")
    rejects("leads out of", LocalFolder(folder).read, "checkpoints/b")


@pytest.mark.parametrize(
    ("exchange", "says"), [(os.mkfifo, "a pipe"), (NOT_READ["a link out"][0], "leads out of")]
)
def test_a_file_is_examined_again_once_it_is_open(folder, monkeypatch, exchange, says):
    (folder / "config.yaml").write_text("{}")
    opens = os.open

    def late(path, *args):
        (folder / "config.yaml").unlink()
        exchange(folder / "config.yaml")
        return opens(path, *args)

    monkeypatch.setattr(os, "open", late)
    rejects(says, open_inside, folder / "config.yaml", folder)


# ---- manifests of data ---------------------------------------------------------------------------------------------


def signed(body, key="id"):
    """A manifest with its right checksum."""
    return canonical_json(
        sealed({name: value for name, value in body.items() if name != key}, key)
    )


def forge(folder, change):
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())
    change(body)
    path.write_bytes(signed(body))


@pytest.fixture
def data(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture(scope="module")
def good(prepared):
    return json.loads((prepared / "manifest.json").read_bytes())


def first(body):
    return body["splits"]["train"][0]


def set_in(pick, key, value):
    return lambda body: pick(body).update({key: value})


def top(body):
    return body


FORGED = {
    "is not the name of a file": set_in(first, "file", "../../x.safetensors"),
    "not the name of a shard": set_in(first, "file", "wanted.json"),
    "cannot have": lambda body: first(body).update(rows=first(body)["rows"] + 50),
    "not a count": set_in(first, "rows", -1),
    "lists .* 2 times": lambda body: body["splits"].update(
        validation=body["splits"]["train"]
    ),  # learnt and held out
    "is not a sha256": set_in(first, "sha256", "abc"),
    "dtype is 'object'": set_in(top, "dtype", "object"),
    "seq_len is '32', not a count": set_in(top, "seq_len", "32"),
    "does not fit ids up to": lambda body: body["tokenizer"].update(mask_id=10**6),
    "'url' is not known": set_in(first, "url", "http://x"),
    "tokenizer is missing": lambda body: body.pop("tokenizer"),
}


@pytest.mark.parametrize("says", FORGED)
def test_a_forged_manifest_of_data_is_rejected_in_one_line(data, says):
    forge(data, FORGED[says])
    with pytest.raises(InputError, match=says) as rejected:
        read_manifest(data)
    assert is_one_line(rejected.value) and "prepare the data again" in str(rejected.value)


@quick
@given(data=st.data())
def test_a_changed_manifest_of_data_is_rejected_or_names_only_files_of_its_folder(good, data):
    body = data.draw(changed(good))
    try:
        manifest = parse_manifest(signed(body))
    except BadContent as error:
        assert is_one_line(error)
    except UnicodeEncodeError:  # cannot be signed
        return
    else:
        assert all((ROOT / shard.file).parent == ROOT for shard in manifest.shards)
        assert all(shard.rows >= 0 for shard in manifest.shards)


def test_data_in_s3_overwrites_nothing_outside_the_cache(prepared, bucket, tmp_path, capsys):
    victim = tmp_path / "victim.safetensors"
    victim.write_text("precious")
    forged = shutil.copytree(prepared, tmp_path / "forged")
    forge(forged, set_in(first, "file", str(victim)))
    location = upload(bucket, forged)
    options = [
        "--endpoint",
        bucket.service.endpoint,
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    assert shards_tool.main(["head", location, *options]) == 2
    assert "is not the name of a file" in capsys.readouterr().err
    assert victim.read_text() == "precious"


# ---- shards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda it: {"tokens": it["tokens"], "x": it["pivot"], "y": it["same_document"]},
            "does not have",
        ),
        (
            lambda it: {**it, "tokens": it["tokens"].reshape(2 * len(it["pivot"]), -1)},
            "does not have",
        ),
        (lambda it: {**it, "pivot": it["pivot"].view(np.float16)}, "does not have"),
        (lambda it: {**it, "tokens": it["tokens"] | 0x8000}, "its vocabulary has"),
    ],
    ids=["other tensors", "another shape", "another dtype", "tokens out of the vocabulary"],
)
def test_a_forged_shard_is_rejected_when_it_is_read(data, change, says):
    """It stands under a manifest with its right length and checksum."""
    shard = data / read_manifest(data).splits["train"][0].file
    content = save(change({name: np.array(tensor) for name, tensor in map_tensors(shard).items()}))
    shard.write_bytes(content)
    forge(data, lambda body: first(body).update(bytes=len(content), sha256=sha256_bytes(content)))
    with pytest.raises(InputError, match=says) as rejected:
        ShardSet(data, read_manifest(data), "train").rows(np.arange(2))
    assert is_one_line(rejected.value)


@quick
@given(data=st.data())
def test_a_header_that_is_not_true_is_one_line(prepared, tmp_path_factory, data):
    path = prepared / read_manifest(prepared).splits["validation"][0].file
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 250))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    forged = tmp_path_factory.getbasetemp() / "forged.safetensors"
    forged.write_bytes(content)
    try:
        map_tensors(forged)
    except InputError as error:
        assert is_one_line(error)


# ---- manifests of checkpoints --------------------------------------------------------------------------------------

SHA256 = "0" * 64
PROGRESS = {"step": 3, "examples": 24, "window": {"loss": 1.5}}
CHECKPOINT = json.loads(
    Manifest(
        step=3,
        fence=1,
        identity={"data": SHA256},
        settings={"best.metric": "loss"},
        progress=PROGRESS,
        world_size=1,
        backend="ddp",
        metric=1.5,
        files={
            "model.pt": {"bytes": 10, "sha256": SHA256},
            "ranks.pt": {"bytes": 10, "sha256": SHA256},
        },
        folder="00000001-0123abcd",
    ).to_json()
)


@quick
@given(data=st.data())
def test_a_changed_manifest_of_a_checkpoint_is_damaged_or_names_only_files_of_its_folder(data):
    body = data.draw(changed(CHECKPOINT))
    try:
        manifest = Manifest.from_json(signed(body, "sha256"))
    except (Damaged, OtherVersion) as error:
        assert is_one_line(error)
    except UnicodeEncodeError:  # cannot be signed
        return
    else:
        assert all(
            (ROOT / name).parent == ROOT for name in [*manifest.files, manifest.folder or "x"]
        )
        assert manifest.num_bytes >= 0 and manifest.step >= 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", {"../model.pt": {"bytes": 1, "sha256": SHA256}}),
        ("folder", "/"),
        ("progress", {"steps": 3}),
        ("step", -1),
    ],
)
def test_a_forged_manifest_of_a_checkpoint_is_damaged(key, value):
    with pytest.raises(Damaged, match="cannot be read") as rejected:
        Manifest.from_json(signed({**CHECKPOINT, key: value}, "sha256"))
    assert is_one_line(rejected.value)
