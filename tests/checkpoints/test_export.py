"""A run's export: without its data, whole or not at all, and not mistaken for a run that has gone on since."""

import json
import shutil

import pytest
from finetuning import asking, tuned
from running import SYLLABLES
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from train.config import InputError
from train.run_folder import exported
from train.run_folder.run_folder import RunFolder
from train.storage.s3 import S3Folder
from train.tools import checkpoints as command

HEADS = {"classify": AutoModelForSequenceClassification, "qa": AutoModelForQuestionAnswering}


@pytest.fixture(scope="module", params=["classify", "qa"])
def finetuned(request, prepared, tmp_path_factory):
    """Kind and run folder of a fine-tuning whose data and cache are gone."""
    folder = tmp_path_factory.mktemp(request.param)
    kind = request.param
    data = folder / "data"
    data.mkdir()
    if kind == "classify":
        rows = [
            f"{SYLLABLES[i % 20]} {SYLLABLES[i % 7]},{('good', 'bad', 'fair')[i % 3]}"
            for i in range(60)
        ]
        (data / "data.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        given = ["task=classify", "data=records", f"data.path={data / 'data.csv'}"]
        given += ["data.validation_fraction=0.3", "seq_len=16"]
    else:
        texts = [" ".join(SYLLABLES[i : i + 8]) for i in range(20)]
        given = [*asking(data, texts, train=12, dev=12), "seq_len=48"]
    run = tuned(folder / "run", prepared / "tokenizer", *given)
    shutil.rmtree(data)
    shutil.rmtree(folder / "cache")
    return kind, run


@pytest.fixture
def unexported(finetuned, tmp_path):
    """The same without its export."""
    return shutil.copytree(finetuned[1], tmp_path / "run", ignore=shutil.ignore_patterns("export"))


# ---- of a fine-tuning, without its data ----------------------------------------------------------------------------


def test_a_fine_tuning_is_exported_without_its_data_as_by_itself(finetuned, unexported, tmp_path):
    assert command.main([str(unexported), "export", str(tmp_path / "out")]) == 0
    wanted = {path.name: path.read_bytes() for path in (finetuned[1] / "export").iterdir()}
    # the run's own: its card, and how far it had come
    del (
        wanted["README.md"],
        wanted[exported.MARK],
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == wanted
    config = HEADS[finetuned[0]].from_pretrained(tmp_path / "out").config
    assert finetuned[0] == "qa" or config.id2label == {0: "bad", 1: "fair", 2: "good"}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").mask_token == "[MASK]"


def test_a_step_of_other_data_is_rejected(unexported, tmp_path, capsys):
    path = unexported / "environment.json"
    content = json.loads(path.read_text())
    content["identity"]["data"] = "other"
    path.write_text(json.dumps(content))
    assert command.main([str(unexported), "export", str(tmp_path / "out")]) == 2
    result = capsys.readouterr().err
    assert (
        "step 2 and " in result
        and "/model are from runs on different data" in result
        and result.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()


# ---- of a run that goes on -----------------------------------------------------------------------------------------


def test_an_export_takes_the_place_of_the_old_when_it_is_whole(tmp_path):
    folder = RunFolder(str(tmp_path))
    with exported.renewed(folder, 4) as scratch:
        (scratch / "weights").write_text("four")
        assert not folder.export.exists()
    with pytest.raises(InputError), exported.renewed(folder, 8) as scratch:
        (scratch / "weights").write_text("ei")
        raise InputError("the disk is full")
    assert sorted(path.name for path in folder.export.iterdir()) == sorted(
        ["weights", exported.MARK]
    )
    assert (folder.export / "weights").read_text() == "four"
    left = tmp_path / f".export.tmp-{'0a' * 16}"  # by a process that was killed
    left.mkdir()
    (left / "half").touch()
    with exported.renewed(folder, 8) as scratch:
        (scratch / "other").touch()
    assert {path.name for path in folder.export.iterdir()} == {"other", exported.MARK}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_that_is_on_its_way_to_s3_is_of_no_step(bucket, monkeypatch):
    folder = RunFolder(bucket.location("run"), bucket.config())
    folder.path.mkdir(parents=True, exist_ok=True)  # of an earlier bucket of this name
    bucket.put("run/checkpoints/step_00000004/manifest.json", b"{}")
    with exported.renewed(folder, 4) as scratch:
        for name in ("a", "model.safetensors"):
            (scratch / name).write_bytes(b"four")
    exported.mirror(folder)
    assert not exported.is_outdated(folder.folder)
    upload = S3Folder.upload

    def break_off(self, name, path):
        if name.endswith("safetensors"):
            raise InputError("no network")
        upload(self, name, path)

    monkeypatch.setattr(S3Folder, "upload", break_off)
    with pytest.raises(InputError):
        exported.mirror(folder)
    assert exported.is_outdated(folder.folder)
    monkeypatch.setattr(S3Folder, "upload", upload)
    exported.mirror(folder)
    assert not exported.is_outdated(folder.folder)
    bucket.put("run/checkpoints/step_00000005/manifest.json", b"{}")
    assert exported.is_outdated(folder.folder)
