"""Compiled graphs of torch.compile that outlive a machine, in a folder or in S3.

A file holds the entries that a run added, as torch.compiler.save_cache_artifacts writes them, behind their sha256. Its
name says whose they are and which: nothing is written twice. They are code: whoever may write to the folder may run
code in the training (docs/security.md). Kernels of CPUs are compiled by the C++ compiler again.
"""

from __future__ import annotations

import logging
import platform
from typing import Any

import torch

from train.config import InputError, S3Config, Unreachable
from train.storage.folders import open_folder, sha256_bytes, sha256_json

logger = logging.getLogger("train")
DIGEST_BYTES = 64  # of the sha256 before the content, in hexadecimal digits
KEY_DIGITS = 20
FAULTS = (InputError, Unreachable, OSError)  # of the folder, without which a run can do


class KernelCache:
    def __init__(self, location: str, s3: S3Config, *, may_write: bool, must_write: bool = False) -> None:
        """`may_write`: on one of the ranks that compile the same; `must_write`: an error if graphs cannot be kept."""
        self.folder, self.may_write, self.must_write = open_folder(location, s3), may_write, must_write
        self.prefix = ""  # of the files' names; known with the model
        self.kept: set[tuple[str, str]] = set()  # kind and key of each entry that is in a file

    def load(self, key: dict[str, Any]) -> None:
        """Load the graphs of a model, if there are any. `key`: all that makes compiled code another one. Raises nothing
        for a folder that cannot be read: it may be one rank's trouble, and the others would wait for that rank.
        """
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        self.prefix = f"torch_compile_{sha256_json({**versions, **key})[:KEY_DIGITS]}_"
        try:
            for name in self.folder.names(self.prefix):
                content = self.folder.read(name)
                digest, entries = content[:DIGEST_BYTES].decode(errors="replace"), content[DIGEST_BYTES:]
                if digest != sha256_bytes(entries):
                    logger.warning("%s/%s is damaged; its graphs are compiled again", self.folder.location, name)
                elif info := torch.compiler.load_cache_artifacts(entries):
                    self.kept |= entries_of(info)
        except FAULTS as error:
            logger.warning("kept graphs cannot be read and are compiled again: %s", error)

    def save(self) -> None:
        """Write what this process has compiled and no file holds. Call it once, at the end: of several contents that
        torch makes in one process, it loads what came last only.
        """
        artifacts = torch.compiler.save_cache_artifacts() if self.may_write else None
        if artifacts is None or not (new := entries_of(artifacts[1]) - self.kept):
            return
        name = f"{self.prefix}{sha256_json(sorted(new))[:KEY_DIGITS]}.bin"
        try:
            self.folder.write(name, sha256_bytes(artifacts[0]).encode() + artifacts[0])
        except FAULTS as error:
            if self.must_write:
                raise
            logger.warning("compiled graphs are not kept for others: %s", error)  # the run has what it needs


def entries_of(info: Any) -> set[tuple[str, str]]:
    """Kind and key of the entries that torch has saved or loaded."""
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}
