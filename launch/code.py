"""The code of a job: a bundle that is packed when the job is submitted, and unpacked once on every node.

So a job always runs the code with which it was submitted, even if files are edited later, another branch is checked
out, or the run is resumed next week. A bundle is named after its checksum.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from functools import partial
from pathlib import Path

import launch
from launch.record import Code
from train.config import check
from train.machine.environment import commit
from train.storage import imported
from train.storage.atomic_io import made_once
from train.storage.caches import private_folder
from train.storage.folders import sha256_bytes
from train.storage.schema import FileName, Sha256

PACKAGES = ["train", "conf", "launch", "ami"]  # train.machine.versions reads ami/versions.yaml
START = "start.py"  # the program that nodes run; it is in the bundle's root, where Python then looks first for modules
IMPORTS = "imports"  # the bundle's folder for the files of `launch --import`
START_CODE = b"""import os, runpy, sys
from pathlib import Path

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)  # needed if PYTHONSAFEPATH is set
if __name__ == "__main__":  # spawned processes import this file, too
    module = sys.argv.pop(1) if "." in sys.argv[1] else "train"  # a module of launch, or a command
    if sys.argv[1] == "train":
        sys.argv += [f"--import={path}" for path in sorted(Path(here, "imports").glob("*.py"))]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def pack() -> tuple[bytes, Code]:
    """Pack PACKAGES and the files of --import. Equal files result in equal bytes."""
    files = dict[str, Path]()
    root = Path(launch.__file__).parent.parent
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[path.relative_to(root).as_posix()] = path
    for name, each in imported.IMPORTED.items():
        files[f"{IMPORTS}/{name}"] = each.path
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        add(archive, START, START_CODE)
        for name, path in files.items():
            add(archive, name, path.read_bytes())
    content = packed.getvalue()
    sha256 = Sha256(sha256_bytes(content))
    return content, Code(FileName(f"code-{sha256[:16]}.tar.gz"), sha256, commit() or "")


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    # owner and time are left out, so that equal code has equal bytes
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o644
    archive.addfile(entry, io.BytesIO(content))


def unpack(content: bytes, sha256: str, folder: Path) -> Path:
    """Unpack a bundle below `folder` if not done before; return its folder. Raises InputError if the bundle changed."""
    matches = sha256_bytes(content) == sha256
    check(
        matches,
        f"the code bundle does not match its checksum {sha256[:16]}...; launch the run again",
    )
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        # The paths inside need no check: whoever made the bundle can run any code anyway.
        return made_once(
            private_folder(folder, "XDG_CACHE_HOME") / sha256[:32],
            partial(archive.extractall, filter="data"),
        )
