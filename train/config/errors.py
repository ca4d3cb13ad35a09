"""Errors: what the user has to fix, and what failed outside of the run."""

from __future__ import annotations


class InputError(Exception):
    """A setting or an input that the user has to fix.

    The message is one line: what is wrong, the value seen, and what would be right. The class is no ValueError:
    code that catches those around a parser must not take an answer of S3 for a damaged file.
    """


class NotPermitted(InputError):
    """The role or user may not delete. All else that a run may not do, it cannot continue without."""


class Unset(InputError):
    """A required setting that is missing."""


class Failure(RuntimeError):
    """An error whose message says all that the user needs: one line, the same on all ranks, and no traceback."""


class Unreachable(Failure):
    """A failure of a service that was asked several times; the same command may succeed later."""
