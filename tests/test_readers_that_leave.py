"""What commands do about readers that leave, Ctrl-C and errors of the system."""

import os
from contextlib import contextmanager, redirect_stdout

import pytest

from train.command import DONE, FAILED, INTERRUPTED, UNREAD, guarded


@contextmanager
def unread():
    """Standard output is a pipe whose reader has left, as of `| head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream, redirect_stdout(stream):  # closing flushes, as Python does at exit
        yield


def show(*lines, code=DONE):
    def act():
        for line in lines:
            print(line)
        return code

    return act


@pytest.mark.parametrize("length", [10, 10**6])  # flushed at the end, or before
def test_a_reader_that_leaves_ends_the_command_without_a_message(capfd, length):
    with unread():
        assert guarded(show("x" * length)) == UNREAD
    assert capfd.readouterr().err == ""


def test_what_a_command_has_seen_is_not_hidden_by_a_reader_that_leaves(capfd):
    """As of `checkpoints verify | head` with damage."""
    with unread():
        assert guarded(show("model.pt does not match its checksum", code=FAILED)) == FAILED
    assert capfd.readouterr().err == ""


def test_a_pipe_that_breaks_elsewhere_is_an_error_like_another(capfd):
    """As of a helper process that was killed."""

    def act():
        raise BrokenPipeError(32, "Broken pipe")

    assert guarded(act) == FAILED
    assert capfd.readouterr().err == "error: Broken pipe\n"


def test_an_interrupt_is_one_line(capfd):
    def act():
        raise KeyboardInterrupt

    assert guarded(act) == INTERRUPTED
    assert capfd.readouterr().err == "interrupted\n"
