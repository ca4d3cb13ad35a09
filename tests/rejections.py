"""How tests see that what a user gave is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from train.config import InputError


def rejects(
    match: str,
    action: Callable[..., Any],
    *arguments: Any,
    error: type = InputError,
    **settings: Any,
) -> str:
    """Check that the call is rejected, in one line in which the regular expression is found. Returns the line."""
    with pytest.raises(error, match=match) as raised:
        action(*arguments, **settings)
    said = str(raised.value)
    assert "\n" not in said
    return said
