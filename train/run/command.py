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
from train.config.checks import LARGEST
from train.machine.console import begin_program, printable, say, trace_of
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
    """The action of a flag that may be given only once. argparse's default action silently keeps the last value."""

    is_given = False

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if option_string and self.is_given:
            raise argparse.ArgumentError(
                self, f"it is given twice, the second time with {values}; give it once"
            )
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
        for kind in (int, float):
            self.register("type", kind, number_flag(kind))
        self.register("action", None, Once)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def format_help(self) -> str:
        self.epilog = self.details() if self.details is not None else None
        return super().format_help()


def number_flag(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a function that parses the number in a flag by the rules for settings."""

    def read(text: str) -> float:
        value = kind(text)  # `kind` also accepts digits of other alphabets
        if not text.isascii() or not abs(value) < LARGEST:  # rejects NaN too
            raise argparse.ArgumentTypeError(
                f"{text} must be a finite number below 2^63, with the digits 0 to 9"
            )
        return value

    return read


def command_parser(
    name: str,
    purpose: str,
    *,
    examples: Sequence[str],
    exits: Mapping[int, str] = EXITS,
    settings: Callable[[], str] | None = None,
    imports: bool = False,
) -> Parser:
    """Make a parser. Each example is a command line that begins with torchrun, or only the command's arguments."""
    prog = f"baretrain {name}"
    shown = [
        example if example.startswith("torchrun") else f"{prog} {example}".rstrip()
        for example in examples
    ]

    def details() -> str:
        codes = [f"  {code:<5}{meaning}" for code, meaning in exits.items()]
        parts = [
            *([settings()] if settings is not None else []),
            "\n".join(["exit codes:", *codes]),
        ]
        return "\n\n".join(parts)

    description = "\n  ".join([f"{purpose}\n\nexamples:", *shown])
    parser = Parser(prog=prog, description=description, details=details)
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


def add_s3_flags(parser: argparse.ArgumentParser, *, caches: bool = True) -> None:
    """Add the flags that `s3_of` reads and, if `caches`, --cache-dir."""
    parser.add_argument("--endpoint", metavar="URL", help="address of an S3-compatible server")
    parser.add_argument("--region", help="region of the bucket")
    parser.add_argument("--profile", help="profile in ~/.aws whose credentials are used")
    parser.add_argument(
        "--path-style",
        action="store_true",
        help="put the bucket in the path, not in the host name",
    )
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
        profile=options.profile,
        path_style=options.path_style,
        sse=options.sse,
    )


def run_flags(
    parser: Parser,
    arguments: Sequence[str] | None,
    action: Callable[[argparse.Namespace, S3Config], int],
) -> int:
    """Parse the flags, call `action` with them and the S3 settings, and return the exit code."""

    def act() -> int:
        options = parser.parse_args(arguments)
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
    line, code = "", DONE
    try:
        code = act()
        sys.stdout.flush()
    except InputError as error:
        line, code = f"error: {error}", REJECTED
    except Failure as error:
        line, code = (
            f"error: {error}{'; try again later' if isinstance(error, Unreachable) else ''}",
            FAILED,
        )
    except KeyboardInterrupt:
        line, code = interrupted
    except OSError as error:
        # for example, `| head` has read enough
        if isinstance(error, BrokenPipeError) and is_unread():
            # keep the command's error code, for example after `checkpoints verify | head`
            code = code or UNREAD
        else:
            line, code = f"error: {explained(error)}", FAILED
        drop_unwritten()
    except Exception as error:
        # torch raises this while it is imported
        if str(error).lstrip().startswith("Invalid log settings"):
            line, code = (
                f"error: TORCH_LOGS={os.environ.get('TORCH_LOGS')} is not valid; unset it",
                REJECTED,
            )
        else:
            sys.stderr.write(f"{trace_of(error)}\n")
            whose = imported.blamed(error) or "this is a bug, please report it"
            line = f"error: {type(error).__name__}: {error}; {whose}"
            code = FAILED
    except BaseException as error:
        # of a library in Rust; it derives from no other exception
        if type(error).__name__ != "PanicException":
            raise
        line, code = (
            f"error: the tokenizer cannot read a text: {error}; choose another tokenizer",
            FAILED,
        )
    if line:
        # Standard error may be closed, or on a full disk.
        with suppress(OSError, ValueError), first_to("report") as is_first:
            if is_first:
                say(printable(line), file=sys.stderr)
    if code == REJECTED:
        leave_rejection(printable(line).removeprefix("error: "))
    return code


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


def explained(error: OSError) -> str:
    """Return the message of an operating system error, with its path."""
    path, reason = (
        error.filename2 or error.filename,
        error.strerror or str(error) or type(error).__name__,
    )
    return (
        reason
        if path is None
        else f"{os.fsdecode(path)}: {reason}"
        if isinstance(path, str | bytes)
        else reason
    )
