"""Without the Hub, whatever asks for it says so in one line, at once; with it, or with its cache, nothing changes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from rejections import rejects
from running import prepare_config

from train.config import HFCorpusConfig, HFDataset, ModelConfig, RecordsConfig, S3Config
from train.data.records.located import find
from train.data.records.sources import version
from train.data.shards.cache import cache_dir
from train.data.text.corpus import open_corpus
from train.data.text.tokenizer import load_tokenizer
from train.models.encoder import build_masked_lm
from train.models.source import resolved, task_tokenizer
from train.run_folder.run_folder import RunFolder
from train.storage import hub_access
from train.storage.folders import open_folder
from train.tools import predict, prepare

SOURCE = "some-user/some-name"


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As for a user who has set nothing."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub_access.silence.cache_clear()
    yield
    hub_access.silence.cache_clear()
    huggingface_hub.close_session()


@pytest.fixture
def nobody_there(online: None, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")


CORPUS = HFCorpusConfig(kind="hf", name="test", datasets=[HFDataset(path=SOURCE)])
ASKING: dict[str, Callable[[], object]] = {
    "weights": lambda: build_masked_lm(
        ModelConfig(pretrained=SOURCE), vocab_size=100, pad_id=0, seq_len=8
    ),
    "rows": lambda: version(RecordsConfig(path=SOURCE), S3Config()),
    "text": lambda: list(open_corpus(CORPUS).documents()),
    "tokenizer of a corpus": lambda: load_tokenizer(SOURCE),
    "tokenizer of a model": lambda: task_tokenizer(ModelConfig(pretrained=SOURCE)),
}


@pytest.mark.parametrize("what", ASKING)
def test_a_hub_that_cannot_be_reached_is_one_line_at_once(what, nobody_there, caplog, capfd):
    caplog.set_level(logging.WARNING)
    rejects(
        f"{SOURCE}.* no such file or folder here, .* the Hub cannot be reached: ", ASKING[what]
    )
    assert "Retrying" not in caplog.text + capfd.readouterr().err
    assert not huggingface_hub.is_offline_mode()  # a push at the end of the run asks again


def test_a_name_in_a_folder_that_exists_here_is_no_folder(
    nobody_there, tmp_path, monkeypatch, capsys
):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for model, said in (
        ("runs/nothing", "there is no such folder in runs"),
        ("nothing", "there is no such file or"),
    ):
        assert predict.main([model, "--text", "a"]) == 2
        assert f"{model} cannot be loaded: {said}" in capsys.readouterr().err


def test_what_is_on_this_machine_asks_nobody(nobody_there, prepared, tmp_path):
    (tmp_path / "some-user").mkdir()
    (tmp_path / SOURCE).symlink_to(prepared / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        load_tokenizer(SOURCE)
        for source in (SOURCE, "~/x", "/no/such", "../x", "file:///x", "s3://a/b", "a/b/c"):
            assert not hub_access.is_at_hub(source)
    assert hub_access.silence.cache_info().currsize == 0


def test_home_is_home_in_quotes_too(tmp_path, prepared, corpus, monkeypatch):
    """The shell leaves "~/x" as it is; settings of every kind lead there all the same."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokenizer").symlink_to(prepared / "tokenizer")
    (tmp_path / "text.txt").symlink_to(corpus)
    monkeypatch.chdir(prepared)
    assert RunFolder("~/run").path == tmp_path / "run"
    assert open_folder("~/saved", S3Config()).location == str(tmp_path / "saved")
    assert cache_dir(RecordsConfig(path="x", cache_dir="~/cache")) == tmp_path / "cache"
    assert find("~", "data.train", "~/text.txt", S3Config()) == [tmp_path / "text.txt"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = resolved(
        ModelConfig(pretrained="~/model", tokenizer="~/tokenizer"), S3Config(), tmp_path
    )
    assert model.pretrained == str(tmp_path / "model")
    assert model.tokenizer == str(tmp_path / "tokenizer")
    rejects("~nobody-of-that-name/x", open_folder, "~nobody-of-that-name/x", S3Config())
    cfg = prepare_config(Path("~/out"), Path("~/text.txt"), "tokenizer.pretrained='~/tokenizer'")
    assert prepare.prepare(cfg) is not None
    assert (tmp_path / "out" / "manifest.json").is_file() and not Path("~").exists()
