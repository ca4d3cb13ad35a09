"""Access to the Hugging Face Hub. The Hub is probed once per process, so that no library retries for minutes.

If the Hub does not answer, its libraries are switched to offline mode: they use their cache, or fail immediately.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from train.config import check
from train.storage.folders import local_path

ANSWERS_WITHIN_S = 5.0
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def hub_or_path(source: str) -> str:
    """Return a Hub id unchanged, and a folder as a path that libraries accept, with "~" expanded."""
    if source.startswith(("~", "file://")):
        return str(local_path(source))
    return source


def is_at_hub(source: str) -> bool:
    """Return whether `source` can only be a Hub id, because nothing of that name is on this machine."""
    return HUB_ID.fullmatch(source) is not None and not local_path(source).exists()


def check_model(key: str, location: str) -> None:
    """Raise InputError if `location` is a path on this machine, and there is no such folder."""
    is_here = location.startswith("s3://") or local_path(location).is_dir()
    check(is_here or is_at_hub(location), f"{key}={location}: there is no such folder")


@cache
def silence() -> str | None:
    """Return why the Hub does not answer, for an error message; None if it answers."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        status = get_session().head(constants.ENDPOINT, timeout=ANSWERS_WITHIN_S).status_code
    except (HTTPError, OSError, ValueError) as error:
        return f"the Hub cannot be reached: {str(error) or type(error).__name__}"
    if status >= 500:
        return f"the Hub answers with status {status}"
    return None


@contextmanager
def asking_hub(source: str) -> Iterator[None]:
    """Let calls in the block ask the Hub for `source`. If the Hub does not answer, the calls use only their cache."""
    if not is_at_hub(source) or silence() is None:
        yield
        return
    from huggingface_hub import constants

    copies = [constants, *([sys.modules["datasets"].config] if "datasets" in sys.modules else [])]
    with ExitStack() as patches:
        for module in copies:
            patches.callback(setattr, module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
            module.HF_HUB_OFFLINE = True
        yield


def fetched(source: str, patterns: Sequence[str]) -> Path:
    """Return `source` if it is a folder. Otherwise fetch a model's files that match `patterns`; return their folder."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=list(patterns)))


def why_missing(source: str, error: BaseException) -> str:
    """Explain a library's error about `source` in one line. An empty `source` stands for local files."""
    if "trust_remote_code" in str(error):
        return "it contains code, which is never executed here"
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if is_at_hub(source):  # `source` may also be the misspelt name of a folder
        if "/" in source and local_path(source).parent.is_dir():
            return f"there is no such folder in {local_path(source).parent}"
        if silence() is not None:
            why = f"it is not in the Hub's cache, and {silence()}"
        return f"there is no such file or folder here, and at the Hub: {why}"
    if not source or local_path(source).exists():
        return why
    return "there is no such file or folder"
