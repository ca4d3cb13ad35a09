"""Code that all commands share: exit codes, flags, one-line errors. This module imports neither Hydra nor torch."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import train
from train.config import Failure, InputError, S3Config, Unreachable
from train.machine.console import begin_program, printable, say, speech, trace_of
from train.machine.torchrun import first_to, leave_rejection
from train.storage import imported

DONE, FAILED, REJECTED, STOPPED = 0, 1, 2, 75  # 75: EX_TEMPFAIL of sysexits.h, "try again later"
INTERRUPTED, UNREAD = 128 + signal.SIGINT, 128 + signal.SIGPIPE  # as shells report these signals
EXITS = {
    DONE: "done",
    FAILED: "failed, or a service did not answer",
    REJECTED: "arguments or input rejected",
}


class Once(argparse.Action):
    """The action of a flag that may be given only once. argparse's own action silently keeps the last value."""

    is_given = False

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option and self.is_given:
            says = f"it is given twice, the second time with {values}; give it once"
            raise argparse.ArgumentError(self, says)
        self.is_given = True
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser of a command's flags, which cannot be abbreviated. It raises InputError if a flag is wrong."""

    def __init__(self, *, details: Callable[[], str] | None = None, **options: Any) -> None:
        """Make a parser; `details` returns the text at the end of --help."""
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self.details = details
        self.register("action", None, Once)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def format_help(self) -> str:
        if self.details is not None:
            self.epilog = self.details()
        else:
            self.epilog = None
        return super().format_help()


def command_parser(
    name: str,
    purpose: str,
    *,
    examples: Sequence[str],
    exits: Mapping[int, str] = EXITS,
    settings: Callable[[], str] | None = None,
    imports: bool = False,
) -> Parser:
    """Make a parser. An example is a line that begins with torchrun or baretrain, or only the command's arguments."""
    prog = f"baretrain {name}"
    lines = [f"{purpose}\n\nexamples:"]
    for example in examples:
        is_whole = example.startswith(("torchrun", "baretrain"))
        lines.append(example if is_whole else f"{prog} {example}".rstrip())

    def details() -> str:
        codes = [f"  {code:<5}{meaning}" for code, meaning in exits.items()]
        parts = ["\n".join(["exit codes:", *codes])]
        if settings is not None:
            parts.insert(0, settings())
        return "\n\n".join(parts)

    parser = Parser(prog=prog, description="\n  ".join(lines), details=details)
    parser.add_argument("--version", action="version", version=f"baretrain {train.__version__}")
    if imports:
        add_import_flag(parser)
    return parser


class Import(argparse.Action):
    """The action of --import: it imports the file immediately, since later arguments may name what the file defines."""

    def __call__(
        self, _parser: object, _namespace: object, value: Any, _flag: object = None
    ) -> None:
        from train.run.own import take  # imported late: few command lines have this flag

        take(value)


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    text = "file with your own tasks, optimizers or schedules (CONTRIBUTING.md); may be given several times"
    parser.add_argument(
        imported.FLAG, dest=argparse.SUPPRESS, action=Import, metavar="FILE.py", help=text
    )


class Quiet(argparse.Action):
    """The action of --quiet."""

    def __call__(self, *_: object) -> None:
        speech.is_quiet = True


def add_s3_flags(parser: argparse.ArgumentParser, *, caches: bool = True) -> None:
    """Add the flags that `s3_of` reads and, if `caches`, --cache-dir."""
    parser.add_argument("--endpoint", metavar="URL", help="address of an S3-compatible server")
    parser.add_argument("--region", help="region of the bucket")
    parser.add_argument(
        "--sse", help="encryption that writes ask for: AES256, aws:kms, or the ARN of a KMS key"
    )
    if caches:
        parser.add_argument(
            "--cache-dir",
            metavar="FOLDER",
            help="folder for local copies of files in S3 (data.cache_dir)",
        )


def s3_of(options: argparse.Namespace) -> S3Config:
    """Return the S3 settings given by the flags of `add_s3_flags`."""
    return S3Config(
        endpoint=options.endpoint,
        region=options.region,
        sse=options.sse,
    )


def run_flags(
    parser: Parser,
    arguments: Sequence[str] | None,
    action: Callable[[argparse.Namespace, S3Config], int],
) -> int:
    """Parse the flags, call `action` with them and the S3 settings, and return the exit code."""

    def act() -> int:
        options = parser.parse_intermixed_args(arguments)
        return action(options, s3_of(options))

    return guarded(act)


def guarded(
    act: Callable[[], int],
    *,
    interrupted: tuple[str, int] = ("interrupted", INTERRUPTED),
) -> int:
    """Call `act` and return the exit code.

    One rank of each machine prints an error as one line on standard error, after a traceback if the error is a bug.
    The program that started torchrun gets the reason for a rejection. `interrupted` is the line to print and the exit
    code after Ctrl-C.
    """
    begin_program()
    line = ""
    code = DONE
    try:
        code = act()
        sys.stdout.flush()
    except KeyboardInterrupt:
        line, code = interrupted
    except Exception as error:
        line, code = report_of(error, code)
    except BaseException as error:
        # A panic of a library in Rust, which derives from no other exception.
        if type(error).__name__ != "PanicException":
            raise
        line = f"error: the tokenizer cannot read a text: {error}; choose another tokenizer"
        code = FAILED
    if line:
        # Standard error may be closed, or on a full disk.
        with suppress(OSError, ValueError), first_to("report") as is_first:
            if is_first:
                say(printable(line), file=sys.stderr)
    if code == REJECTED:
        leave_rejection(printable(line).removeprefix("error: "))
    return code


def report_of(error: Exception, code: int) -> tuple[str, int]:
    """Return the line to print about an error, and the exit code. `code` is that of the command if it had ended."""
    if isinstance(error, InputError):
        return f"error: {error}", REJECTED
    if isinstance(error, Unreachable):
        return f"error: {error}; try again later", FAILED
    if isinstance(error, Failure):
        return f"error: {error}", FAILED
    if isinstance(error, OSError):
        # For example, `| head` has read enough. The command's error code is kept.
        is_read_enough = isinstance(error, BrokenPipeError) and is_unread()
        drop_unwritten()
        if is_read_enough:
            return ("", code or UNREAD)
        return (f"error: {os_words(error)}", FAILED)
    sys.stderr.write(f"{trace_of(error)}\n")
    whose = imported.blamed(error) or "this is a bug, please report it"
    return f"error: {type(error).__name__}: {error}; {whose}", FAILED


def drop_unwritten() -> None:
    """Drop output that cannot be written: otherwise the flush at exit would fail and change the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_unread() -> bool:
    """Return whether standard output is a pipe without a reader."""
    poll = select.poll()
    with suppress(OSError, ValueError):  # standard output may not be a file
        poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def os_words(error: OSError) -> str:
    """Return the message of an operating system error, with its path."""
    reason = error.strerror or str(error) or type(error).__name__
    path = error.filename2 or error.filename
    if isinstance(path, str | bytes):
        return f"{os.fsdecode(path)}: {reason}"
    return reason
