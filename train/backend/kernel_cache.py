"""Compiled graphs of torch.compile that outlive a machine: files in a folder or in S3, several for a model and device.

TorchInductor keeps what it compiled on this machine's disk (TORCHINDUCTOR_CACHE_DIR). A file holds the entries that a
run added, as torch.compiler.save_cache_artifacts writes them, behind their sha256. Its name says whose they are and
which: nothing is written twice, and other shapes replace nothing. They are code, and loading them runs it: whoever may
write to the folder may run code in the training, as with the sources themselves (docs/security.md). Kernels of CPUs
are compiled by the C++ compiler again.
"""

from __future__ import annotations

import logging
import platform
from concurrent.futures import Future
from typing import Any

import torch

from train.config import InputError, S3Config, Unreachable, check
from train.host.threads import pool_beside_training
from train.storage.folders import open_folder, sha256_bytes, sha256_json

logger = logging.getLogger("train")
DIGEST_BYTES = 64  # of the sha256 before the content, in hexadecimal digits
KEY_DIGITS = 20
MOST_FILES = 64  # of one model and device: every rank reads all of them when it starts
FAULTS = (InputError, Unreachable, OSError)  # of the folder, without which a run can do


class KernelCache:
    def __init__(self, location: str, s3: S3Config, *, may_write: bool, must_write: bool = False) -> None:
        """`may_write`: on one of the ranks that compile the same; `must_write`: an error if graphs cannot be kept."""
        self.folder, self.may_write, self.must_write = open_folder(location, s3), may_write, must_write
        self.prefix = ""  # of the files' names; known with the model
        self.num_files = 0
        self.kept: set[tuple[str, str]] = set()  # kind and key of each entry that is in a file, or on its way there
        self.pool, self.writing = pool_beside_training("kernel cache"), Future[None]()
        self.writing.set_result(None)

    def load(self, key: dict[str, Any]) -> None:
        """Load the graphs of a model, if there are any. `key`: all that makes compiled code another one. Raises nothing
        for a folder that cannot be read: it may be one rank's trouble, and the others would wait for that rank.
        """
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        self.prefix = f"torch_compile_{sha256_json({**versions, **key})[:KEY_DIGITS]}_"
        try:
            names = self.folder.names(self.prefix)
            self.num_files = len(names)
            for name in names:
                self.load_file(name)
        except FAULTS as error:
            logger.warning("kept graphs cannot be read and are compiled again: %s", error)

    def load_file(self, name: str) -> None:
        content = self.folder.read(name)
        digest, entries = content[:DIGEST_BYTES].decode(errors="replace"), content[DIGEST_BYTES:]
        if digest != sha256_bytes(entries):
            logger.warning("%s/%s is damaged; its graphs are compiled again", self.folder.location, name)
            return
        info = torch.compiler.load_cache_artifacts(entries)
        if info is not None:
            self.kept |= entries_of(info)

    def save(self) -> None:
        """Write what this process has compiled and no file holds, in the background. The training thread calls it,
        which compiles nothing meanwhile: torch changes the same lists.
        """
        artifacts = torch.compiler.save_cache_artifacts() if self.may_write else None
        if artifacts is None:
            return
        content, info = artifacts
        # What torch saved before is in the content as well, but loading gives what came last only: hence several files.
        new = entries_of(info) - self.kept
        if new:
            self.kept |= new
            self.writing.result()  # raises what `write` does not expect
            name = f"{self.prefix}{sha256_json(sorted(new))[:KEY_DIGITS]}.bin"
            self.writing = self.pool.submit(self.write, name, content)

    def write(self, name: str, content: bytes) -> None:
        try:
            check(
                self.num_files < MOST_FILES,
                f"{self.folder.location} has {self.num_files} files {self.prefix}*.bin; delete those of no use",
            )
            self.folder.write(name, sha256_bytes(content).encode() + content)
            self.num_files += 1
        except FAULTS as error:
            if self.must_write:
                raise
            logger.warning("compiled graphs are not kept for others: %s", error)  # the run has what it needs

    def close(self) -> None:
        self.save()
        self.writing.result()
        self.pool.shutdown()


def entries_of(info: Any) -> set[tuple[str, str]]:
    """Kind and key of the entries that torch has saved or loaded."""
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}
