"""Pushing the exported model of a run to the Hugging Face Hub, with its tokenizer and card, in one commit.

The token (from HF_TOKEN or `hf auth login`) is never written to a file or a message.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.config import Failure, InputError, S3Config, TrainConfig, Unreachable, check
from train.machine import host
from train.machine.launched import launched
from train.observe import card
from train.run_folder.run_folder import RunFolder
from train.storage.folders import is_s3, local_path, make_folder
from train.storage.foreign import is_inside
from train.storage.schema import is_path

SILENCE_S = 600.0  # seconds to wait for the Hub's response to a part of an upload
VISIBLE = {True: "private", False: "public"}


# ---- before and after a run ----------------------------------------------------------------------------------------


def check_push(cfg: TrainConfig) -> None:
    """Raise InputError if hub.push_to is no name of a repository, or if this machine has no token."""
    # The Hub itself is not asked: a run that trains for days can be pushed after its end.
    if cfg.hub.push_to is not None and launched().rank == 0:
        check_name("hub.push_to=", cfg.hub.push_to)
        checked_token(cfg.hub.push_to)


def push(folder: RunFolder, to: str) -> str:
    """Push a complete run to a private repository and return its address. Raises Failure if the Hub rejects it."""
    try:
        return send(gathered(folder.path), to, private=True)
    except (InputError, Unreachable) as error:
        again = command(folder.location, to, folder.s3)
        raise Failure(f"{error}; the run is complete: push it again with {again}") from None


def command(location: str, to: str, s3: S3Config) -> str:
    """Return the command line that pushes a run later."""
    arguments = ["baretrain", "hub", location, "--to", to]
    return shlex.join([*arguments, *(s3.flags() if is_s3(location) else [])])


# ---- what is pushed ------------------------------------------------------------------------------------------------


def gathered(run: Path) -> dict[str, Path]:
    """Return {name on the Hub: path} of the exported files. Raises InputError if nothing was exported."""
    export = run / "export"
    check(
        (export / "config.json").is_file() and any(export.glob("*.safetensors")),
        f"{run} has no exported model: the run has not ended, or had export=false; see baretrain checkpoints",
    )
    paths = [path for path in sorted(export.rglob("*")) if is_to_push(path, run)]
    return {path.relative_to(export).as_posix(): path for path in paths}


def is_to_push(path: Path, run: Path) -> bool:
    """Return whether a file is pushed.

    Hidden files are not pushed: they are unfinished or belong to another tool. Links to files outside the run are not
    pushed: in a run folder that was copied from elsewhere, they may point to private files of this machine.
    """
    return path.is_file() and is_path(path.relative_to(run).as_posix()) and is_inside(path, run)


@contextmanager
def run_here(folder: RunFolder, cache_dir: str | None) -> Iterator[Path]:
    """Yield the run folder on this machine; for a run in S3, a copy of its export."""
    there = folder.folder.names_here()
    check("environment.json" in there, f"{folder.location} is not a run folder; name a run_dir")
    if not folder.is_remote:
        yield folder.path
        return
    cache = host.cache_root()
    if cache_dir is not None:
        cache = local_path(cache_dir)
    with tempfile.TemporaryDirectory(prefix="hub-", dir=make_folder(cache)) as scratch:
        for name in folder.folder.names("export/"):
            path = Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            folder.folder.download(name, path)
        yield Path(scratch)


# ---- the Hub -------------------------------------------------------------------------------------------------------


def check_name(key: str, to: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(to if "/" in to else "/")
    except HFValidationError as error:
        raise InputError(
            f"{key}{to} must be user/name, such as jane/tweets-bert: letters, digits, '-', '_' and '.'"
        ) from error


def checked_token(to: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        raise InputError(
            f"no token for the Hugging Face Hub to push to {to}: run hf auth login, or set HF_TOKEN"
        )
    return token


def send(files: dict[str, Path], to: str, *, private: bool) -> str:
    """Push all files in one commit to a model repository, which is created if it is missing. Return its address.

    Raises InputError if the token may not write to it, or if everybody can see it although the run is `private`.
    Raises Unreachable if the Hub does not answer.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    token = checked_token(to)
    operations = []
    for name, path in files.items():
        content: str | bytes = str(path)
        if name == card.NAME:
            content = path.read_bytes().replace(card.HERE.encode(), to.encode())
        operations.append(CommitOperationAdd(name, content))
    with asking(to, token):
        api = HfApi(token=token)
        url = api.create_repo(to, private=private, exist_ok=True)
        is_private = bool(api.model_info(to).private)
        check(
            is_private == private,
            f"{to} is {VISIBLE[is_private]} on the Hub, but the run should be {VISIBLE[private]}: choose another name, "
            f"or change this on the Hub, or push with baretrain hub RUN --to {to} --{VISIBLE[is_private]}",
        )
        api.create_commit(to, operations, commit_message="Model and card of a training run")
    return str(url)


@contextmanager
def asking(to: str, token: str) -> Iterator[None]:
    """Turn the Hub's errors into one-line errors that do not contain the token.

    A request fails after SILENCE_S without an answer, and huggingface_hub retries it. The new error has no cause: a
    traceback would print it, and some httpx errors quote the request's headers, which contain the token.
    """
    from huggingface_hub import get_session
    from huggingface_hub.errors import HTTPError

    session = get_session()
    before = session.timeout
    session.timeout = SILENCE_S
    try:
        yield
    except (InputError, Failure):
        raise
    except (HTTPError, OSError, ValueError, RuntimeError) as error:  # an upload may raise any
        cause: BaseException = error
        if isinstance(error, RuntimeError) and error.__cause__ is not None:
            cause = error.__cause__
        text = f"{type(cause).__name__}: {cause}"
        for secret in (token, repr(token)[1:-1]):
            text = text.replace(secret, "(token)")
        text = " ".join(text.split())
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            raise InputError(
                f"not pushed to {to}: the Hub rejects the token; run hf auth login, or set HF_TOKEN to one with write "
                f"access ({text})"
            ) from None
        raise Unreachable(f"not pushed to {to}: the Hub cannot be reached ({text})") from None
    finally:
        session.timeout = before
