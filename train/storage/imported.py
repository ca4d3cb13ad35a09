"""Files of user code that `--import` names. Each file is run once, and is identified by its name and checksum.

Only the command line can name these files. Settings cannot, so that no run folder can make this program run code.
Importing this module does not import torch.
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
from train.storage.folders import local_path, sha256_bytes

FLAG = "--import"
NAME = re.compile(r"[A-Za-z_]\w*\.py")


@dataclass(frozen=True)
class Imported:
    path: Path
    sha256: str
    module: ModuleType


IMPORTED: dict[str, Imported] = {}  # imported files by name


def load(given: str) -> ModuleType:
    """Run a file as a module, unless it was run before, and return the module. Raises InputError if it fails."""
    path = local_path(given).absolute()
    is_name = NAME.fullmatch(path.name) is not None
    check(
        is_name,
        f"{FLAG} {given} must be a Python file like path/to/focal.py; it may import installed modules",
    )
    check(path.is_file(), f"{FLAG} {given}: there is no file {path}")
    if (known := IMPORTED.get(path.name)) is not None:
        check(
            known.path == path,
            f"{FLAG}: {known.path} and {path} have the same file name; rename one of them",
        )
        return known.module
    content = path.read_bytes()
    module = ModuleType(f"imported_{path.stem}")  # a name that no other module has
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look up a class's module there
    try:
        # Python's loader could use cached bytecode of older content with the same modification time and length.
        exec(compile(content, str(path), "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        line = line_in(error, path) or getattr(error, "lineno", None)
        if line is None:
            where = ""
        else:
            where = f"line {line}: "
        raise InputError(f"{FLAG} {given}: {where}{type(error).__name__}: {error}") from error
    IMPORTED[path.name] = Imported(path, sha256_bytes(content), module)
    return module


def flags() -> list[str]:
    """Return the flags that make another process import the same files."""
    return [f"{FLAG}={each.path}" for each in IMPORTED.values()]


def checksums() -> dict[str, str]:
    """Return the imported files' part of a run's identity: the checksum of each file."""
    return {f"{FLAG} {name}": each.sha256 for name, each in IMPORTED.items()}


def check_repeated(identity: Mapping[str, object], source: object) -> None:
    """Raise InputError if the run with this `identity` imported files that are not imported now, and name them."""
    missing = [
        key
        for key in identity
        if key.startswith(FLAG) and key.removeprefix(f"{FLAG} ") not in IMPORTED
    ]
    check(
        not missing,
        f"{source} belongs to a run with {' '.join(missing)}; repeat the flag with the file's path",
    )


def code_of(kind: type) -> dict[str, str]:
    """Return the checksums of the imported files that define a class or its base classes; {} if none does."""
    modules = {base.__module__ for base in kind.__mro__}
    return {
        name: each.sha256 for name, each in IMPORTED.items() if each.module.__name__ in modules
    }


def line_in(error: BaseException, path: Path) -> int | None:
    """Return the innermost line of a file in an error's traceback; None if the file is not in the traceback."""
    lines = [
        each.lineno
        for each in traceback.extract_tb(error.__traceback__)
        if each.filename == str(path)
    ]
    if lines:
        return lines[-1]
    return None


def blamed(error: BaseException) -> str | None:
    """Return the imported file and line that led to an error; None if no imported file is in its traceback."""
    for name, each in IMPORTED.items():
        line = line_in(error, each.path)
        if line is not None:
            return f"{name}, line {line}"
    return None
