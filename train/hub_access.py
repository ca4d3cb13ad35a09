"""Whether the Hugging Face Hub answers, asked once, so that no library tries for minutes what cannot come.

Where it does not, the libraries are told that they are offline: they take what their cache holds, or fail at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from train.storage import local_path

ANSWERS_WITHIN_S = 5.0
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def hub_or_path(source: str) -> str:
    """The same with a home folder written out: what a library takes for a Hub id or a folder."""
    return str(local_path(source)) if source.startswith(("~", "file://")) else source


def is_at_hub(source: str) -> bool:
    """It can only be a Hub id: nothing of that name is on this machine."""
    return HUB_ID.fullmatch(source) is not None and not local_path(source).exists()


@cache
def silence() -> str | None:
    """Why the Hub gives nothing now, for an error message; None if it answers."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        status = get_session().head(constants.ENDPOINT, timeout=ANSWERS_WITHIN_S).status_code
    except (HTTPError, OSError, ValueError) as error:
        return f"the Hub cannot be reached: {str(error) or type(error).__name__}"
    return f"the Hub answers with status {status}" if status >= 500 else None


@contextmanager
def asking_hub(source: str) -> Iterator[None]:
    """Calls of libraries that may ask the Hub for `source`. While it is silent, they use their cache alone."""
    if not is_at_hub(source) or silence() is None:
        yield
        return
    from huggingface_hub import constants

    def set_offline(on: bool) -> None:
        constants.HF_HUB_OFFLINE = on
        if "datasets" in sys.modules:  # which keeps a copy
            sys.modules["datasets"].config.HF_HUB_OFFLINE = on

    before = constants.HF_HUB_OFFLINE
    set_offline(True)
    try:
        yield
    finally:
        set_offline(before)


def why_missing(source: str, error: Exception) -> str:
    """What a library's error about `source` comes to, in one line."""
    if is_at_hub(source) and silence() is not None:
        return f"it is not in the Hub's cache, and {silence()}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
