"""Pushing a run to the Hugging Face Hub, in one commit.

The commit contains the exported model with its tokenizer and card, the TensorBoard files, the evaluation, and the
numbers in the metrics lines. The configuration and the strings in these lines are not pushed, since they may contain
private paths. The token (from HF_TOKEN or `hf auth login`) is never written to a file or a message.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from train.config import Failure, InputError, S3Config, TrainConfig, Unreachable, check
from train.machine import host
from train.machine.launched import launched
from train.observe import card
from train.observe.lines import read_lines
from train.run_folder.run_folder import RunFolder
from train.storage.folders import LocalFolder, is_s3, local_path, make_folder
from train.storage.foreign import is_inside
from train.storage.schema import is_path

if TYPE_CHECKING:
    from huggingface_hub import HfApi


logger = logging.getLogger("train")
# seconds to wait for the Hub's response to a query, and to a part of an upload
ASK_S, SEND_S = (
    10.0,
    600.0,
)
# kinds of metrics lines whose numbers are pushed
NUMBERS_OF = (
    "train",
    "eval",
    "checkpoint",
    "summary",
)
# read for the card
CARD_FILES = (
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "data.json",
    "evaluation.json",
)


# ---- before and after a run ----------------------------------------------------------------------------------------


def check_push(cfg: TrainConfig) -> None:
    """Check on rank 0 that the Hub would accept the run. Raises InputError if not, unless the run has begun."""
    # A run that has begun only gets a warning: it may train for days, and it can still be pushed after its end.
    to = cfg.hub.push_to
    if to is None or launched().rank != 0:
        return
    check_name("hub.push_to=", to)
    try:
        open_hub(to, private=True)  # private until a person has reviewed the run
    except (InputError, Unreachable) as error:
        later = command(cfg.run_dir, to, cfg.s3)
        has_begun = "environment.json" in RunFolder(cfg.run_dir, cfg.s3).folder.names_here()
        check(has_begun, f"{error}; or leave hub.push_to out and push later with {later}")
        logger.warning("%s; the run starts anyway, and tries to push at its end", error)


def push(folder: RunFolder, to: str) -> str:
    """Push a complete run to a private repository and return its address. Raises Failure if the Hub rejects it."""
    try:
        return send(gathered(folder.path, Path(folder.location).name), to, private=True)
    except (InputError, Unreachable) as error:
        again = command(folder.location, to, folder.s3)
        raise Failure(f"{error}; the run is complete: push it again with {again}") from None


def command(location: str, to: str, s3: S3Config) -> str:
    """Return the command line that pushes a run later."""
    arguments = ["baretrain", "hub", location, "--to", to]
    return shlex.join([*arguments, *(s3.flags() if is_s3(location) else [])])


# ---- what is pushed ------------------------------------------------------------------------------------------------


def gathered(run: Path, name: str) -> dict[str, Path | bytes]:
    """Return {name on the Hub: path or content} of the files to push. Raises InputError if nothing was exported."""
    export = run / "export"
    check(
        (export / "config.json").is_file() and any(export.glob("*.safetensors")),
        f"{run} has no exported model: the run has not ended, or had export=false; see baretrain checkpoints",
    )
    files: dict[str, Path | bytes] = {
        path.relative_to(export).as_posix(): path
        for path in sorted(export.rglob("*"))
        if is_to_push(path, run)
    }
    for path in sorted(
        path for path in run.glob("tensorboard/events.out.tfevents.*") if is_to_push(path, run)
    ):
        # events.out.tfevents.<time>.<host>.<pid>.<number>; the host is left out
        parts = path.name.split(".")
        files[f"runs/{name}/{'.'.join([*parts[:4], *parts[4:][-2:]])}"] = path
    if is_to_push(run / "evaluation.json", run):
        files["evaluation.json"] = run / "evaluation.json"
    numbers = (  # Strings are left out, since they may contain hosts and paths.
        {key: value for key, value in line.items() if key == "kind" or not isinstance(value, str)}
        for line in read_lines(LocalFolder(run))
        if line["kind"] in NUMBERS_OF
    )
    files["metrics.jsonl"] = "".join(json.dumps(line) + "\n" for line in numbers).encode()
    readme = export / card.NAME
    files[card.NAME] = (
        readme.read_bytes() if is_to_push(readme, run) else card.card(run, name).encode()
    )
    return files


def is_to_push(path: Path, run: Path) -> bool:
    """Return whether a file is pushed.

    Hidden files are not pushed: they are unfinished or belong to another tool. Links to files outside the run are not
    pushed: in a run folder that was copied from elsewhere, they may point to private files of this machine.
    """
    return path.is_file() and is_path(path.relative_to(run).as_posix()) and is_inside(path, run)


@contextmanager
def run_here(folder: RunFolder, cache_dir: str | None) -> Iterator[Path]:
    """Yield the run folder on this machine; for a run in S3, a copy of the files to push."""
    check(
        "environment.json" in folder.folder.names_here(),
        f"{folder.location} is not a run folder; name a run_dir",
    )
    if not folder.is_remote:
        yield folder.path
        return
    cache = make_folder(local_path(cache_dir) if cache_dir else host.cache_root())
    with tempfile.TemporaryDirectory(
        prefix="hub-", dir=cache, ignore_cleanup_errors=True
    ) as scratch:
        for name in (
            *folder.folder.names("export/"),
            *(folder.folder.names_here() & set(CARD_FILES)),
        ):
            path = Path(scratch) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            folder.folder.download(name, path)
        if folder.tensorboard.is_dir():
            shutil.copytree(folder.tensorboard, Path(scratch) / "tensorboard")
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


def open_hub(to: str, *, private: bool) -> HfApi:
    """Return the Hub's API, after checking that the token may write to the repository `to`.

    Raises InputError if it may not, if `to` exists with the wrong visibility, or if HF_HUB_OFFLINE is set. Raises
    Unreachable if the Hub does not answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    with asking(f"nothing can be pushed to {to}", ASK_S):
        token = get_token()
        check(
            token is not None,
            f"no token for the Hugging Face Hub to push to {to}: run hf auth login, or set HF_TOKEN",
        )
        api = HfApi(token=token)
        who = api.whoami()
        names = [who.get("name"), *(each.get("name") for each in who.get("orgs") or ())]
        user = to.partition("/")[0]
        check(
            user in names,
            f"the Hub's token of {names[0]} cannot push to {to}: {names[0]} is not a member of {user}",
        )
        role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
        check(
            role != "read",
            f"the Hub's token is read-only and cannot push to {to}; create one with write access",
        )
        try:
            is_private = bool(api.model_info(to).private)
        except RepositoryNotFoundError:
            return api
        there, wanted = ("private" if each else "public" for each in (is_private, private))
        check(
            there == wanted,
            f"{to} is {there} on the Hub, but the run should be {wanted}: choose another name, make it {wanted}, or "
            f"push the finished run with baretrain hub RUN --to {to} --{there}",
        )
        return api


def send(files: dict[str, Path | bytes], to: str, *, private: bool) -> str:
    """Push all files in one commit to a model repository, which is created if it is missing. Return its address."""
    from huggingface_hub import CommitOperationAdd

    api = open_hub(to, private=private)
    readme = files[card.NAME]
    assert isinstance(readme, bytes)
    files = {**files, card.NAME: readme.replace(card.HERE.encode(), to.encode())}
    with asking(f"not pushed to {to}", SEND_S):
        url = api.create_repo(to, private=private, exist_ok=True)
        operations = [
            CommitOperationAdd(name, str(content) if isinstance(content, Path) else content)
            for name, content in files.items()
        ]
        api.create_commit(
            to, operations, commit_message="Model, card and curves of a training run"
        )
        return str(url)


@contextmanager
def asking(what: str, silence_s: float) -> Iterator[None]:
    """Turn the Hub's errors into one-line errors that do not contain the token.

    A request fails after `silence_s` without an answer, and huggingface_hub retries it. The new error has no cause:
    a traceback would print it, and some httpx errors quote the request's headers, which contain the token.
    """
    from huggingface_hub import get_session, get_token
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    session = get_session()
    before, session.timeout = session.timeout, silence_s
    try:
        yield
    except (InputError, Failure):
        raise
    except (
        HTTPError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # an upload may raise any of these
        cause = (
            error.__cause__
            if isinstance(error, RuntimeError) and error.__cause__ is not None
            else error
        )
        status = getattr(getattr(cause, "response", None), "status_code", None)
        text, token = f"{type(cause).__name__}: {cause}", get_token() or "\0"
        text = " ".join(
            text.replace(token, "(token)").replace(repr(token)[1:-1], "(token)").split()
        )
        if status == 401:
            raise InputError(
                f"{what}: the Hub rejects the token; run hf auth login, or fix HF_TOKEN"
            ) from None
        if status == 403:
            raise InputError(f"{what}: the Hub's token has no permission ({text})") from None
        kind = InputError if isinstance(cause, OfflineModeIsEnabled) else Unreachable
        raise kind(f"{what}: the Hub cannot be reached ({text})") from None
    finally:
        session.timeout = before
