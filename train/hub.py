"""Pushing a run to the Hugging Face Hub: `python -m train.hub RUN --to user/name [--public] [--dry-run]`.

What goes there: the exported model with its tokenizer and card, TensorBoard's files under runs/<name of the run>, the
best evaluation, and the numbers of the metrics. Not the configuration, nor words of the log: they may name private
places. All of it is one commit. The token is huggingface_hub's to find (HF_TOKEN, or what `hf auth login` left); it
goes into no file and no message.

Exit code 0: done, 1: the Hub did not answer as it should, 2: wrong arguments, or the Hub refuses.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from train import card, cli, machine
from train.command import EXITS, FAILED, REFUSED, add_s3_flags, command_parser, run_flags
from train.config import Failure, InputError, S3Config, TrainConfig, Unreachable, check
from train.goodput import read
from train.launched import launched
from train.run_folder import RunFolder
from train.storage import is_s3, local_path, make_folder
from train.untrusted import is_inside, is_path

if TYPE_CHECKING:
    from train.s3 import S3Folder

logger = logging.getLogger("train")
ASK_S, SEND_S = 10.0, 600.0  # the Hub may be silent for: a question, a part of an upload
NUMBERS_OF = ("train", "eval", "checkpoint", "summary")  # lines of the metrics whose numbers are pushed
WORDS = ("config.yaml", "environment.json", "metrics.jsonl", "data.json", "evaluation.json")  # what the card reads


# ---- before and after a run ----------------------------------------------------------------------------------------


def check_push(cfg: TrainConfig) -> None:
    """Whether the Hub will take the run at its end; rank 0 asks. InputError if not, and if the Hub does not answer.

    A run that has begun goes on all the same: its end may be days ahead, and then nothing is lost either.
    """
    to = cfg.hub.push_to
    if to is None or launched().rank != 0:
        return
    check_name("hub.push_to=", to)
    try:
        check_welcome(to, private=cfg.hub.private)
    except (InputError, Unreachable) as error:
        if "environment.json" in RunFolder(cfg.run_dir, cfg.s3).folder.names_here():
            logger.warning("%s; the run goes on, and pushes at its end", error)
            return
        later = command(cfg.run_dir, to, cfg.s3, private=cfg.hub.private)
        raise InputError(f"{error}; or leave hub.push_to out and push later with {later}") from None


def push(folder: RunFolder, to: str, *, private: bool) -> str:
    """Push a run that is whole on this machine, as at its end. Gives the address.

    Raises:
        Failure: the Hub did not take it; the run is whole, and the line tells how to push it again.
    """
    try:
        return send(gathered(folder.path, name_of(folder)), to, private=private)
    except (InputError, Unreachable) as error:
        s3 = cast("S3Folder", folder.folder).s3 if folder.is_remote else S3Config()
        again = command(folder.location, to, s3, private=private)
        raise Failure(f"{error}; the run is whole, push it again with {again}") from None


def command(location: str, to: str, s3: S3Config, *, private: bool) -> str:
    """The line that pushes a run later."""
    words = ["python", "-m", "train.hub", location, "--to", to, *([] if private else ["--public"])]
    return shlex.join([*words, *(s3.flags() if is_s3(location) else [])])


def name_of(folder: RunFolder) -> str:
    return folder.location.rstrip("/").rpartition("/")[2] or "run"


# ---- what is pushed ------------------------------------------------------------------------------------------------


def gathered(run: Path, name: str) -> dict[str, Path | bytes]:
    """Name on the Hub and file or content of all that is pushed. InputError if the run has no exported model."""
    export = run / "export"
    check(
        (export / "config.json").is_file() and any(export.glob("*.safetensors")),
        f"{run} has no exported model: the run has not ended, or had export=false; see python -m train.checkpoints",
    )
    files: dict[str, Path | bytes] = {
        path.relative_to(export).as_posix(): path for path in sorted(export.rglob("*")) if is_to_push(path, run)
    }
    events = run / "tensorboard"
    for path in sorted(path for path in events.glob("events.out.tfevents.*") if is_inside(path, events)):
        parts = path.name.split(".")  # events.out.tfevents.<time>.<host>.<pid>.<number>; the host is nobody's business
        files[f"runs/{name}/{'.'.join([*parts[:4], *parts[4:][-2:]])}"] = path
    if is_to_push(run / "evaluation.json", run):
        files["evaluation.json"] = run / "evaluation.json"
    files["metrics.jsonl"] = "".join(json.dumps(line) + "\n" for line in numbers(run / "metrics.jsonl")).encode()
    readme = export / card.NAME
    files[card.NAME] = readme.read_bytes() if is_to_push(readme, run) else card.card(run, name).encode()
    return files


def is_to_push(path: Path, run: Path) -> bool:
    """No hidden files: what is half written, and what tools of other projects leave. No link that leads out of the run:
    a run folder from elsewhere may have one to a private file of this machine.
    """
    return path.is_file() and is_path(path.relative_to(run).as_posix()) and is_inside(path, run)


def numbers(metrics: Path) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl without their words, which may tell of hosts and paths."""
    for line in read(metrics):
        if line["kind"] in NUMBERS_OF:
            yield {key: value for key, value in line.items() if key == "kind" or not isinstance(value, str)}


@contextmanager
def run_here(folder: RunFolder, cache_dir: str | None) -> Iterator[Path]:
    """A run folder on this machine; of one in S3 a copy of what is pushed. TensorBoard's files are not in S3: they go
    along from the machine that trained.
    """
    check("environment.json" in folder.folder.names_here(), f"{folder.location} is no run folder; give a run_dir")
    if not folder.is_remote:
        yield folder.path
        return
    place = make_folder(local_path(cache_dir) if cache_dir else machine.cache_root())
    with tempfile.TemporaryDirectory(prefix="hub-", dir=place) as scratch:
        there = set(folder.folder.names("export/")) | ({*folder.folder.names_here()} & set(WORDS))
        for name in sorted(there):
            path = Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            cast("S3Folder", folder.folder).download(name, path)
        if folder.tensorboard.is_dir():
            (Path(scratch) / "tensorboard").symlink_to(folder.tensorboard.resolve())
        yield Path(scratch)


# ---- the Hub -------------------------------------------------------------------------------------------------------


def check_name(key: str, to: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    said = f"{key}{to} must be user/name, as jane/tweets-bert: letters, digits, '-', '_' and '.'"
    check(to.count("/") == 1, said)
    try:
        validate_repo_id(to)
    except HFValidationError as error:
        raise InputError(said) from error


def check_welcome(to: str, *, private: bool) -> None:
    """Whether the token may write to a repository of that name, and only those may see it who are to.

    Raises:
        InputError: not so, there is no token, or no Hub to be had (HF_HUB_OFFLINE).
        Unreachable: the Hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    with asking(f"nothing can be pushed to {to}", ASK_S):
        api = HfApi(token=token_for(to))
        who = api.whoami()
        names = [who.get("name"), *(each.get("name") for each in who.get("orgs") or ())]
        user = to.partition("/")[0]
        check(user in names, f"the Hub's token is of {names[0]}, who is not {user} nor of such an organisation: {to}")
        role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
        check(role != "read", f"the Hub's token may read, not write to {to}; make one that may write")
        try:
            is_private = bool(api.model_info(to).private)
        except RepositoryNotFoundError:
            return
        words = {True: "private", False: "public"}
        check(
            is_private == private,
            f"{to} is {words[is_private]} on the Hub, the run is to be {words[private]}: choose another name, change "
            f"it there, or set hub.private={str(is_private).lower()} (--{words[is_private]})",
        )


def send(files: dict[str, Path | bytes], to: str, *, private: bool) -> str:
    """One commit of all files to a model repository, made if need be. Gives its address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    check_welcome(to, private=private)
    readme = files[card.NAME]
    assert isinstance(readme, bytes)
    files = {**files, card.NAME: readme.replace(card.HERE.encode(), to.encode())}
    with asking(f"not pushed to {to}", SEND_S):
        api = HfApi(token=token_for(to))
        place = api.create_repo(to, private=private, exist_ok=True)
        operations = [
            CommitOperationAdd(name, str(content) if isinstance(content, Path) else content)
            for name, content in files.items()
        ]
        api.create_commit(to, operations, commit_message="Model, card and curves of a training run")
        return str(place)


def token_for(to: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    check(
        token is not None, f"no token of the Hugging Face Hub to push to {to} with: run hf auth login, or set HF_TOKEN"
    )
    return str(token)


@contextmanager
def asking(what: str, patience_s: float) -> Iterator[None]:
    """What goes wrong with the Hub as one line, in which the token is not. Silence ends after `patience_s`; tries again
    are huggingface_hub's. No cause is kept: a traceback would print it, and some of httpx's quote the request's head.
    """
    from huggingface_hub import get_session, get_token
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    session = get_session()
    before, session.timeout = session.timeout, patience_s
    try:
        yield
    except (InputError, Failure):
        raise
    except (HTTPError, OSError, ValueError, RuntimeError) as error:  # an upload may raise any of these
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        told, token = f"{type(cause).__name__}: {cause}", get_token() or "\0"
        told = " ".join(told.replace(token, "(token)").replace(repr(token)[1:-1], "(token)").split())
        if status == 401:
            raise InputError(f"{what}: the Hub does not know the token; run hf auth login, or mend HF_TOKEN") from None
        if status == 403:
            raise InputError(f"{what}: the Hub's token may not ({told})") from None
        kind = InputError if isinstance(cause, OfflineModeIsEnabled) else Unreachable
        raise kind(f"{what}: the Hub is not to be had ({told})") from None
    finally:
        session.timeout = before


# ---- command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "train.hub",
        "Push a run that has ended to the Hugging Face Hub: model, tokenizer, card, metrics and curves.",
        examples=(
            "runs/tweets --to jane/tweets-bert --dry-run",
            "runs/tweets --to jane/tweets-bert",
            "s3://bucket/runs/tweets --to jane/tweets-bert --public",
        ),
        exits={**EXITS, FAILED: "the Hub or S3 did not answer", REFUSED: "arguments refused, or the Hub refuses"},
    )
    parser.add_argument("run", metavar="RUN", help="run_dir of a run that has ended: a folder or s3://bucket/prefix")
    parser.add_argument("--to", metavar="USER/NAME", required=True, help="repository on the Hub, made if need be")
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument("--private", action="store_true", help="seen by its owners alone (the default)")
    seen.add_argument("--public", action="store_true", help="seen by all")
    parser.add_argument("--dry-run", action="store_true", help="list what would be pushed, and send nothing")
    add_s3_flags(parser)
    return run_flags(parser, arguments, act)


def act(options: argparse.Namespace, s3: S3Config) -> int:
    check_name("--to ", options.to)
    folder = RunFolder(options.run, s3)
    with run_here(folder, options.cache_dir) as run:
        files = gathered(run, name_of(folder))
        if options.dry_run:
            for name, content in files.items():
                size = len(content) if isinstance(content, bytes) else content.stat().st_size
                print(f"{size / 1e6:10.3f} MB  {name}")
            print(f"nothing was sent to {options.to}: leave --dry-run out to push this")
            return cli.DONE
        print(send(files, options.to, private=not options.public))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
