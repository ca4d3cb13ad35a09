"""Pushing to the Hub: what goes there, what does not, who may, and what is said when it does not work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from finetuning import word_tokenizer
from finished_run import SECRETS, write
from huggingface_hub import constants
from rejections import rejects
from running import ROOT, contents
from services.fake_hub import READ_TOKEN, TOKEN, FakeHub
from services.process import free_port
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from train.config import Failure, HubConfig, InputError, S3Config
from train.observe import card
from train.observe import push as hub
from train.run_folder.exported import MARK
from train.run_folder.run_folder import RunFolder
from train.storage import hub_access
from train.tools import hub as hub_command
from train.tools import predict

TO = "jane/tweets"


@pytest.fixture
def the_hub(monkeypatch, tmp_path):
    """The only Hub that this process knows, with a token that may write to it."""
    with FakeHub() as fake:
        changes = {  # what the environment says to a new process is read once, at the import
            "ENDPOINT": fake.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": fake.endpoint
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }
        for name, value in changes.items():
            monkeypatch.setattr(constants, name, value)
        for name, text in {
            "HF_TOKEN": TOKEN,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, text)
        # of an earlier test it may know that there was no Hub
        monkeypatch.setattr(hub_access, "silence", lambda: None)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        huggingface_hub.close_session()
        yield fake


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with its export. Tests that change it work on a copy."""
    run = write(tmp_path_factory.mktemp("runs") / "demo")
    word_tokenizer(["good", "bad"]).save_pretrained(run / "export")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    BertForSequenceClassification(BertConfig(vocab_size=7, num_labels=3, **sizes)).save_pretrained(
        run / "export"
    )
    card.write(RunFolder(str(run)))
    (run / "export" / ".README.md.tmp-1").write_text("half written")
    return run


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "demo"))


def pushed(the_hub: FakeHub) -> dict[str, bytes]:
    return the_hub.repos["models", TO].files


def config(run: Path, to: str | None = TO) -> Any:
    """As much of a configuration as the check before a run looks at."""
    return SimpleNamespace(hub=HubConfig(push_to=to), run_dir=str(run), s3=S3Config())


def test_a_pushed_model_loads_by_its_id(the_hub, finished, capsys):
    assert hub_command.main([str(finished), "--to", TO, "--public"]) == 0
    assert capsys.readouterr().out == f"{the_hub.endpoint}/{TO}\n"
    assert not the_hub.repos["models", TO].private
    loaded = [
        (
            AutoModelForSequenceClassification.from_pretrained(source).eval(),
            AutoTokenizer.from_pretrained(source),
        )
        for source in (TO, finished / "export")
    ]
    result = [
        model(**tokenizer("good bad good", return_tensors="pt")).logits
        for model, tokenizer in loaded
    ]
    assert torch.equal(*result)
    assert huggingface_hub.ModelCard.load(TO).data.model_name == "demo"
    assert predict.main([TO, "--text", "good bad good", "backend.device=cpu"]) == 0


def test_all_of_it_is_one_commit_and_nothing_private_goes_along(the_hub, finished):
    hub.push(RunFolder(str(finished)), TO)
    repo = the_hub.repos["models", TO]
    assert (repo.private, len(repo.commits)) == (True, 1)
    wanted = {"config.json", "model.safetensors", MARK, "tokenizer.json", "tokenizer_config.json"}
    assert set(repo.files) == wanted | {"README.md"}
    weights = (finished / "export" / "model.safetensors").read_bytes()
    assert repo.files["model.safetensors"] == weights
    assert f'model="{TO}"' in repo.files["README.md"].decode()
    everything = b"\n".join([*(name.encode() for name in repo.files), *repo.files.values()])
    assert not [secret for secret in (*SECRETS, str(finished)) if secret.encode() in everything]


def test_links_of_a_run_from_elsewhere_lead_to_nothing_of_this_machine(run, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text('{"PRIVATE KEY": 1}')
    os.mkfifo(run / "export/pipe.txt")
    for name in ("export/notes.txt", "export/README.md"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
    files = hub.gathered(run)
    assert "model.safetensors" in files
    assert not {"pipe.txt", "notes.txt", "README.md"} & files.keys()


def test_a_run_in_s3_is_pushed_from_another_machine(
    the_hub, finished, bucket, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    for path in finished.rglob("*"):
        if path.is_file() and path.parent.name != "tensorboard":
            bucket.put(f"demo/{path.relative_to(finished)}", path.read_bytes())
    bucket.put("demo/checkpoints/step_1/weights.pt", b"large")
    flags = [
        "--endpoint",
        bucket.service.endpoint,
        "--region",
        bucket.config().region,
    ]
    assert hub_command.main([bucket.location("demo"), "--to", TO, *flags]) == 0
    result = pushed(the_hub)
    assert result["model.safetensors"] == (finished / "export" / "model.safetensors").read_bytes()
    assert "README.md" in result and len(result) == 6
    # the copy is gone
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_labelled_data_comes_from_the_hub(texts, tokenizer_folder, tmp_path):
    """A process of its own: datasets reads the environment when it is imported."""
    rows = [f'"{text}",{number % 2}\n'.encode() for number, text in enumerate(texts[:40])]
    files = {
        "train.csv": b"".join([b"text,label\n", *rows[:30]]),
        "validation.csv": b"".join([b"text,label\n", *rows[30:]]),
    }
    words = (
        "task=classify data=records data.format=hub data.path=lab/texts data.train=train".split()
    )
    words += ["data.validation=validation", f"data.cache_dir={tmp_path}/cache"]
    words += ["model=albert_tiny", f"model.tokenizer={tokenizer_folder}", "seq_len=32"]
    private = "{config_name: default, data_files: 'hf://datasets/lab/private@main/a.csv'}"
    with FakeHub() as fake:
        fake.put("lab/texts", files, kind="datasets")
        fake.put("lab/private", {"a.csv": files["train.csv"]}, kind="datasets", private=True)
        card = f"---\nconfigs: [{private}]\n---\n"
        fake.put("lab/evil", {**files, "README.md": card.encode()}, kind="datasets")
        env = {**os.environ, **fake.environment(tmp_path)}
        command = [sys.executable, "-m", "train", "records", *words]
        run = partial(
            subprocess.run, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        done = run(command)
        evil = run([*command, "data.path=lab/evil"])
        assert not [request for request in fake.requests if "private" in request.path]
    assert done.returncode == 0, done.stderr
    assert re.search(r"train: +30 ", done.stdout), done.stdout
    assert re.search(r"validation: +10 ", done.stdout), done.stdout
    assert evil.returncode == 2
    assert "@main/a.csv', which is not a file of this data set" in evil.stderr


def test_a_run_needs_a_name_and_a_token_to_push(the_hub, tmp_path, monkeypatch):
    hub.check_push(config(tmp_path))
    rejects("hub.push_to=tweets must be user/name", hub.check_push, config(tmp_path, "tweets"))
    monkeypatch.delenv("HF_TOKEN")
    rejects("no token for the Hugging Face Hub", hub.check_push, config(tmp_path))
    hub.check_push(config(tmp_path, None))
    (tmp_path / "token").write_text(TOKEN + "\n")  # of `hf auth login`
    hub.check_push(config(tmp_path))
    assert the_hub.requests == []


REJECTED = [
    ({}, "mary/tweets", "set HF_TOKEN to one with write access"),
    ({"HF_TOKEN": "hf_wrong"}, TO, "rejects the token"),
    ({"HF_TOKEN": READ_TOKEN}, TO, "rejects the token"),
    ({"HF_HUB_OFFLINE": True}, TO, "the Hub cannot be reached"),
    ({"ENDPOINT": f"http://127.0.0.1:{free_port()}"}, TO, "the Hub cannot be reached"),
]


@pytest.mark.parametrize(("world", "to", "said"), REJECTED)
def test_what_could_not_be_pushed_is_rejected_in_one_line(
    the_hub, finished, monkeypatch, world, to, said
):
    for name, value in world.items():
        if name == "HF_TOKEN":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(constants, name, value)
    with pytest.raises(Failure, match=f"not pushed to {to}: .*{said}.*the run is complete"):
        hub.push(RunFolder(str(finished)), to)


@pytest.mark.parametrize("there", [True, False])
def test_who_may_see_it_is_not_a_surprise(the_hub, finished, capsys, there):
    the_hub.put(TO, {}, private=there)
    if there:
        assert hub_command.main([str(finished), "--to", TO, "--public"]) == 2
        assert "is private on the Hub, but the run should be public" in capsys.readouterr().err
    else:
        with pytest.raises(Failure, match=f"is public .* baretrain hub RUN --to {TO} --public"):
            hub.push(RunFolder(str(finished)), TO)
    assert pushed(the_hub) == {}


@pytest.mark.parametrize("part", ["/api/repos/create", "/commit/"])
def test_what_the_hub_does_not_take_is_pushed_again_by_the_line_in_the_error(
    the_hub, finished, part, capsys
):
    before = contents(finished)
    the_hub.faults[part] = 500
    with pytest.raises(
        Failure, match=f"push it again with baretrain hub {finished} --to {TO}$"
    ) as failed:
        hub.push(RunFolder(str(finished)), TO)
    assert "\n" not in str(failed.value)
    assert not any(repo.files for repo in the_hub.repos.values())  # all or nothing
    assert contents(finished) == before
    again = str(failed.value).split("baretrain hub ")[1].split()
    assert hub_command.main(again) == 1
    assert "try again later" in capsys.readouterr().err
    the_hub.faults.clear()
    assert hub_command.main(again) == 0
    assert "model.safetensors" in pushed(the_hub) and the_hub.repos["models", TO].private


@pytest.mark.parametrize("token", [TOKEN, READ_TOKEN, "hf_wrongtoken", "hf_illegal\x0btoken"])
def test_the_token_is_shown_to_nobody(the_hub, run, monkeypatch, capfd, log, token):
    monkeypatch.setenv("HF_TOKEN", token)
    errors = []
    new = config(run.parent / "new")
    old = RunFolder(str(run))
    for act in (lambda: hub.check_push(new), lambda: hub.push(old, TO)):
        try:
            act()
        except (InputError, Failure):
            errors.append(traceback.format_exc())
    hub_command.main([str(run), "--to", TO])
    assert bool(errors) == (token != TOKEN)
    card.write(RunFolder(str(run)))
    printed = capfd.readouterr()
    texts = [*errors, printed.out, printed.err, log.text]
    texts += [repo.files.get("README.md", b"").decode() for repo in the_hub.repos.values()]
    secrets = {token, repr(token)[1:-1], token.encode("unicode_escape").decode()}
    assert not [text for text in texts if any(secret in text for secret in secrets)]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert files and not [path for path in files if token.encode() in path.read_bytes()]


def test_a_hub_that_is_silent_is_not_waited_for_for_ever(the_hub, finished, monkeypatch):
    monkeypatch.setattr(hub, "SILENCE_S", 0.2)
    the_hub.faults["/api/repos/create"] = 0  # no answer
    with pytest.raises(Failure, match="the Hub cannot be reached .*[Tt]ime"):
        hub.push(RunFolder(str(finished)), TO)
