"""Files of the user's own code that `--import` names: each is run once, and known by its name and checksum.

Only the command line names them, never a setting, so that nothing in a run folder runs code. It imports no torch.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from train.config import InputError, check
from train.system.folders import local_path, sha256_bytes

FLAG = "--import"
NAME = re.compile(r"[A-Za-z_]\w*\.py")


@dataclass(frozen=True)
class Imported:
    path: Path
    sha256: str
    module: ModuleType


IMPORTED: dict[str, Imported] = {}  # by the name of the file


def load(given: str) -> ModuleType:
    """Return the module that a file is, which is run unless it was. Raises InputError if that fails."""
    path = local_path(given).absolute()
    is_name = NAME.fullmatch(path.name) is not None
    check(is_name, f"{FLAG} {given} must be a Python file, as path/to/focal.py, which may import installed modules")
    check(path.is_file(), f"{FLAG} {given}: there is no file {path}")
    if (known := IMPORTED.get(path.name)) is not None:
        check(known.path == path, f"{FLAG}: {known.path} and {path} have one name, by which a run knows them")
        return known.module
    content = path.read_bytes()
    module = ModuleType(f"imported_{path.stem}")  # no other module is called so
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look for their module there
    try:
        # Python's own loader would take bytecode of another content that has the same time and length.
        exec(compile(content, str(path), "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        line = line_in(error, path) or getattr(error, "lineno", None)
        where = "" if line is None else f"line {line}: "
        raise InputError(f"{FLAG} {given}: {where}{type(error).__name__}: {error}") from error
    IMPORTED[path.name] = Imported(path, sha256_bytes(content), module)
    return module


def flags() -> list[str]:
    """Return the flags by which another process imports the same files."""
    return [f"{FLAG}={each.path}" for each in IMPORTED.values()]


def identity() -> dict[str, str]:
    """Return the part of a run's identity that the files are."""
    return {f"{FLAG} {name}": each.sha256 for name, each in IMPORTED.items()}


def check_repeated(identity: Mapping[str, object], source: object) -> None:
    """Raise InputError that names the files with which the run of this identity began and which are not imported."""
    missing = [key for key in identity if key.startswith(FLAG) and key.removeprefix(f"{FLAG} ") not in IMPORTED]
    check(not missing, f"{source} is of a run with {' '.join(missing)}: repeat that, with the path of the file")


def code_of(kind: type) -> dict[str, str]:
    """Return the checksum of the files that define a class or one that it extends; empty if the program does."""
    modules = {base.__module__ for base in kind.__mro__}
    return {name: each.sha256 for name, each in IMPORTED.items() if each.module.__name__ in modules}


def line_in(error: BaseException, path: Path) -> int | None:
    """Return the line of a file in which an error arose, or which called what did; None if the file has no part."""
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
    return lines[-1] if lines else None


def blamed(error: BaseException) -> str | None:
    """Return the file and line of the user's code in which an error arose; None if it is the program's."""
    lines = ((name, line_in(error, each.path)) for name, each in IMPORTED.items())
    return next((f"{name}, line {line}" for name, line in lines if line is not None), None)
