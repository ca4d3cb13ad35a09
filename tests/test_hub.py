"""Pushing to the Hub: what goes there, what does not, who may, and what is said when it does not work."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from finished_run import SECRETS, write
from huggingface_hub import constants
from services.fake_hub import READ_TOKEN, TOKEN, FakeHub
from services.process import free_port
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from train import card, hub
from train.config import Failure, HubConfig, InputError, S3Config
from train.run_folder import RunFolder

TO = "jane/tweets"
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


@pytest.fixture
def the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """The only Hub that this process knows, with a token that may write to it."""
    with FakeHub() as found:
        turn_to(found.endpoint, monkeypatch, tmp_path)
        yield found


def turn_to(endpoint: str, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """What the environment says to a new process is read once, at the import."""
    changes = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(home / "cache"),
        "HF_TOKEN_PATH": str(home / "token"),
    }
    for name, value in changes.items():
        monkeypatch.setattr(constants, name, value)
    for name, text in {"HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    huggingface_hub.close_session()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its export. Tests that change it work on a copy."""
    run = write(tmp_path_factory.mktemp("runs") / "demo")
    vocabulary = {word: place for place, word in enumerate([*SPECIAL.values(), "good", "bad"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(run / "export")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=6, num_labels=3, **sizes)).save_pretrained(run / "export")
    card.write(RunFolder(str(run)))
    (run / "export" / ".README.md.tmp-1").write_text("half written")
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "demo"))


def pushed(the_hub: FakeHub) -> dict[str, bytes]:
    return the_hub.repos["models", TO].files


def config(run: Path, to: str | None = TO, **more: Any) -> Any:
    """As much of a configuration as the check before a run looks at."""
    return SimpleNamespace(hub=HubConfig(push_to=to, **more), run_dir=str(run), s3=S3Config())


# ---- what goes there -----------------------------------------------------------------------------------------------


def test_a_pushed_model_loads_by_its_id(the_hub: FakeHub, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hub.main([str(finished), "--to", TO]) == 0
    assert capsys.readouterr().out == f"{the_hub.endpoint}/{TO}\n"
    loaded = [
        (AutoModelForSequenceClassification.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place))
        for place in (TO, finished / "export")
    ]
    found = [model(**tokenizer("good bad good", return_tensors="pt")).logits for model, tokenizer in loaded]
    assert torch.equal(*found)
    assert huggingface_hub.ModelCard.load(TO).data.model_name == "demo"
    assert any("/resolve/" in request.path for request in the_hub.requests)


def test_all_of_it_is_one_commit_and_private(the_hub: FakeHub, finished: Path) -> None:
    hub.push(RunFolder(str(finished)), TO, private=True)
    repo = the_hub.repos["models", TO]
    assert (repo.private, len(repo.commits)) == (True, 1)
    assert sorted(repo.files) == [
        "README.md",
        "config.json",
        "evaluation.json",
        "metrics.jsonl",
        "model.safetensors",
        "runs/demo/events.out.tfevents.1732215000.4711.0",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert repo.files["model.safetensors"] == (finished / "export" / "model.safetensors").read_bytes()


def test_public_is_for_those_who_ask(the_hub: FakeHub, finished: Path) -> None:
    assert hub.main([str(finished), "--to", TO, "--public"]) == 0
    assert not the_hub.repos["models", TO].private


def test_links_of_a_run_from_elsewhere_lead_to_nothing_of_this_machine(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text('{"PRIVATE KEY": 1}')
    for name in ("export/notes.txt", "export/README.md", "evaluation.json", "tensorboard/events.out.tfevents.1.h.1.0"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
    files = hub.gathered(run, "demo")
    contents = [content if isinstance(content, bytes) else content.read_bytes() for content in files.values()]
    assert not [content for content in contents if b"PRIVATE" in content]
    assert "model.safetensors" in files and "evaluation.json" not in files


def test_nothing_private_goes_along(the_hub: FakeHub, finished: Path) -> None:
    hub.push(RunFolder(str(finished)), TO, private=True)
    everything = b"\n".join([name.encode() + b"\n" + content for name, content in pushed(the_hub).items()])
    assert not [secret for secret in (*SECRETS, str(finished)) if secret.encode() in everything]
    lines = [json.loads(line) for line in pushed(the_hub)["metrics.jsonl"].splitlines()]
    assert [line["kind"] for line in lines] == ["train", "eval"] * 3 + ["summary"]
    assert lines[1]["f1_macro"] == 0.5
    assert {key for line in lines for key, value in line.items() if isinstance(value, str)} == {"kind"}


def test_the_card_names_where_it_is_and_keeps_what_its_author_wrote(the_hub: FakeHub, run: Path) -> None:
    readme = run / "export" / "README.md"
    readme.write_text(readme.read_text() + "\nMy own words.\n")
    hub.push(RunFolder(str(run)), TO, private=True)
    text = pushed(the_hub)["README.md"].decode()
    assert f'model="{TO}"' in text and text.endswith("\nMy own words.\n")


def test_an_older_run_without_a_card_gets_one(the_hub: FakeHub, run: Path) -> None:
    (run / "export" / "README.md").unlink()
    assert hub.main([str(run), "--to", TO]) == 0
    assert b"# demo" in pushed(the_hub)["README.md"]


def test_pushed_again_it_is_replaced(the_hub: FakeHub, run: Path) -> None:
    for text in ("first", "second"):
        (run / "export" / "README.md").write_text(text)
        hub.push(RunFolder(str(run)), TO, private=True)
    assert pushed(the_hub)["README.md"] == b"second"


def test_a_dry_run_lists_and_sends_nothing(
    the_hub: FakeHub, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")  # it needs none
    assert hub.main([str(finished), "--to", TO, "--dry-run"]) == 0
    *files, last = capsys.readouterr().out.splitlines()
    weights = (finished / "export" / "model.safetensors").stat().st_size
    assert [line.split() for line in files if "model.safetensors" in line] == [
        [f"{weights / 1e6:.3f}", "MB", "model.safetensors"]
    ]
    assert len(files) == 8 and last.startswith("nothing was sent")
    assert the_hub.requests == []


def test_a_run_in_s3_is_pushed_from_another_machine(
    the_hub: FakeHub, finished: Path, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    for path in finished.rglob("*"):
        if path.is_file() and path.parent.name != "tensorboard":
            bucket.put(f"demo/{path.relative_to(finished)}", path.read_bytes())
    bucket.put("demo/checkpoints/step_1/weights.pt", b"large")
    flags = ["--endpoint", bucket.service.endpoint, "--region", bucket.config().region, "--path-style"]
    assert hub.main([bucket.location("demo"), "--to", TO, *flags]) == 0
    found = pushed(the_hub)
    assert found["model.safetensors"] == (finished / "export" / "model.safetensors").read_bytes()
    assert {"README.md", "evaluation.json", "metrics.jsonl"} <= set(found) and len(found) == 7
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]  # the copy is gone


def test_the_fake_hub_serves_data_sets_too(tmp_path: Path) -> None:
    """Other tests rely on it. In a process of its own: datasets reads the environment at its import."""
    rows = "text,label\ngood,1\nbad,0\n"
    code = "import datasets; print(datasets.load_dataset('lab/texts', split='validation', revision='main')[:])"
    with FakeHub() as found:
        found.put("lab/texts", {"train.csv": b"text,label\nbad,0\n", "validation.csv": rows.encode()}, kind="datasets")
        env = {**os.environ, **found.environment(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{'text': ['good', 'bad'], 'label': [1, 0]}", done.stderr


# ---- refused before a run ------------------------------------------------------------------------------------------


def test_who_may_push_may_train(the_hub: FakeHub, tmp_path: Path) -> None:
    hub.check_push(config(tmp_path, None))
    assert the_hub.requests == []
    for to in (TO, "lab/tweets"):
        hub.check_push(config(tmp_path, to))
    assert the_hub.repos == {}  # only asked


def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")


def token_is(token: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setenv("HF_TOKEN", token)


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")


REFUSED: list[tuple[Callable[[pytest.MonkeyPatch], None] | None, str, str]] = [
    (None, "tweets", "must be user/name"),
    (None, "jane/a/b", "must be user/name"),
    (None, "jane/two words", "must be user/name"),
    (None, "mary/tweets", "is of jane, who is not mary"),
    (no_token, TO, "no token of the Hugging Face Hub"),
    (token_is("hf_wrong"), TO, "does not know the token"),
    (token_is(READ_TOKEN), TO, "may read, not write"),
    (offline, TO, "the Hub is not to be had"),
    (nobody_there, TO, "the Hub is not to be had"),
]


@pytest.mark.parametrize(("world", "to", "said"), REFUSED)
def test_what_could_not_be_pushed_is_refused_before(
    the_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Any, to: str, said: str
) -> None:
    if world is not None:
        world(monkeypatch)
    with pytest.raises(InputError, match=said) as refused:
        hub.check_push(config(tmp_path, to, private=False))
    assert "\n" not in str(refused.value)
    if "user/name" not in said:
        assert f"leave hub.push_to out and push later with python -m train.hub {tmp_path} --to {to} --public" in str(
            refused.value
        )


@pytest.mark.parametrize("there", [True, False])
def test_who_may_see_it_is_not_a_surprise(the_hub: FakeHub, finished: Path, tmp_path: Path, there: bool) -> None:
    the_hub.put(TO, {}, private=there)
    with pytest.raises(InputError, match=f"is {'private' if there else 'public'} on the Hub"):
        hub.check_push(config(tmp_path, private=not there))
    with pytest.raises(Failure):
        hub.push(RunFolder(str(finished)), TO, private=not there)
    assert pushed(the_hub) == {}
    hub.check_push(config(tmp_path, private=there))


@pytest.mark.parametrize("world", [offline, nobody_there, no_token])
def test_a_run_that_has_begun_is_only_warned(
    the_hub: FakeHub, finished: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, world: Any
) -> None:
    world(monkeypatch)
    monkeypatch.setattr(logging.getLogger("train"), "propagate", True)
    hub.check_push(config(finished))
    assert "the run goes on" in caplog.text


def test_only_one_rank_asks(the_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    hub.check_push(config(tmp_path))
    assert the_hub.requests == []


# ---- failures at the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["/api/whoami-v2", "/api/repos/create", "/commit/", "/api/validate-yaml"])
def test_what_the_hub_does_not_take_is_pushed_again_by_the_line_that_is_told(
    the_hub: FakeHub, finished: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    the_hub.faults[part] = 500
    with pytest.raises(Failure, match=f"push it again with python -m train.hub {finished} --to {TO}$") as failed:
        hub.push(RunFolder(str(finished)), TO, private=True)
    assert "\n" not in str(failed.value)
    assert not any(repo.files for repo in the_hub.repos.values())  # all or nothing
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    the_hub.faults.clear()
    assert hub.main(str(failed.value).split("train.hub ")[1].split()) == 0
    assert "model.safetensors" in pushed(the_hub)
    capsys.readouterr()


@pytest.mark.parametrize(("broken", "code", "said"), [("export", 2, "no exported model"), ("all", 2, "no run folder")])
def test_what_is_no_finished_run_is_refused(
    the_hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str], broken: str, code: int, said: str
) -> None:
    shutil.rmtree(run if broken == "all" else run / "export")
    assert hub.main([str(run), "--to", TO]) == code
    assert said in capsys.readouterr().err
    assert the_hub.repos == {}


def test_the_command_tells_what_is_wrong_in_one_line(
    the_hub: FakeHub, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.main([str(finished), "--to", "tweets"]) == 2
    nobody_there(monkeypatch)
    assert hub.main([str(finished), "--to", TO]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --to tweets must be user/name")
    assert "the Hub is not to be had" in second and second.endswith("try again later")


# ---- the token -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, READ_TOKEN, "hf_wrongtoken", "hf_illegal\x0btoken"])
def test_the_token_is_told_to_nobody(
    the_hub: FakeHub,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    token: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HF_TOKEN", token)
    told = []
    for act in (
        lambda: hub.check_push(config(run.parent / "new")),
        lambda: hub.push(RunFolder(str(run)), TO, private=True),
    ):
        try:
            act()
        except (InputError, Failure):
            told.append(traceback.format_exc())
    hub.main([str(run), "--to", TO])
    assert bool(told) == (token != TOKEN)
    card.write(RunFolder(str(run)))
    found = capfd.readouterr()
    texts = [
        *told,
        found.out,
        found.err,
        caplog.text,
        *(repo.files.get("README.md", b"").decode() for repo in the_hub.repos.values()),
    ]
    secrets = {token, repr(token)[1:-1], token.encode("unicode_escape").decode()}
    assert not [text for text in texts if any(secret in text for secret in secrets)]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert files and not [path for path in files if token.encode() in path.read_bytes()]


def test_the_login_file_is_a_usual_place(the_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text(TOKEN + "\n")
    hub.check_push(config(tmp_path))
    assert {request.authorization for request in the_hub.requests if "whoami" in request.path} == {f"Bearer {TOKEN}"}


def test_a_hub_that_is_silent_is_not_waited_for_for_ever(
    the_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ASK_S", 0.2)
    monkeypatch.setitem(the_hub.faults, "/api/whoami-v2", 0)  # 0: no answer
    with pytest.raises(InputError, match="the Hub is not to be had .*[Tt]ime"):
        hub.check_push(config(tmp_path))
