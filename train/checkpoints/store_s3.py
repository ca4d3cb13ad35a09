"""Checkpoints in S3, which has no rename: files get names of their own, and the manifest is created last."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tenacity import retry, retry_if_exception_type, stop_after_attempt

from train.checkpoints.manifest import (
    FILE,
    Damaged,
    Manifest,
    OtherVersion,
    check_files,
    check_sizes,
    is_part,
    step_name,
    step_of,
)
from train.config import Failure, InputError
from train.run_folder.folder import SAVING
from train.run_folder.ownership import LeaseLost, name_of, numbers
from train.storage.atomic_io import write_atomic
from train.storage.folders import READS, canonical_json, check_room
from train.storage.s3 import S3Folder
from train.storage.schema import BadContent, FileName, of_type, read_object

logger = logging.getLogger("train")
PREFIX = "checkpoints/"
PARTS = "parts"  # in the folder of this machine
UNFINISHED = re.compile(r"((\d{8,})-[0-9a-f]{8})\.unfinished")  # beside the folder of a save
WRITTEN = re.compile(r"\d{8,}-[0-9a-f]{8}/.*")  # a file in such a folder
MAX_NAMED = 3  # steps in a message

read_again = retry(retry=retry_if_exception_type(Damaged), stop=stop_after_attempt(READS), reraise=True)


class S3Store:
    """See `train.checkpoints.store.Store`. There is no LATEST: a hint is not worth a request that fails after the
    commit.

    checkpoints/step_00001000/manifest.json                  its creation is the commit
    checkpoints/step_00001000/00000007-5f0c1a2b/model.pt     lease number and a random one: no two saves share it
    checkpoints/step_00001000/00000007-5f0c1a2b.unfinished   names the files that are being written or removed
    checkpoints/step_00001000/manifest.damaged-9e1f.json     put aside, with the files it names

    Only files that such a mark names are ever removed. All else stays: the files of a checkpoint whose manifest
    somebody deleted, and objects of the user.

    Parts of a large file whose upload was killed are in no listing but cost money: a lifecycle rule of the bucket
    removes them (AbortIncompleteMultipartUpload).
    """

    compares_when_written = True

    def __init__(self, folder: S3Folder, scratch: Path) -> None:
        self.folder, self.local = folder, scratch
        self.location = f"{folder.location}/checkpoints"

    def key(self, step: int, name: str) -> str:
        return f"{PREFIX}{step_name(step)}/{name}"

    def names(self) -> list[tuple[int, str]]:
        """The objects of all steps: step, and name below it."""
        parts = [name.removeprefix(PREFIX).partition("/") for name in self.folder.names(f"{PREFIX}step_")]
        return [(step, name) for head, _, name in parts if (step := step_of(head)) is not None]

    def steps(self) -> list[int]:
        return sorted({step for step, name in self.names() if name == FILE})

    def aside(self) -> list[str]:
        return [f"{step_name(step)}/{name}" for step, name in self.names() if is_aside(name)]

    @read_again
    def manifest(self, step: int) -> Manifest:
        try:
            manifest = Manifest.from_json(self.folder.read(self.key(step, FILE)))
        except FileNotFoundError as error:
            raise Damaged(f"{FILE} is missing") from error
        manifest.check_step(step)
        if manifest.folder is None:
            raise Damaged(f"{FILE} does not say which folder the files are in")
        return manifest

    def look(self, step: int) -> Manifest:
        manifest = self.manifest(step)
        check_sizes(lambda name: self.folder.size(self.key(step, f"{manifest.folder}/{name}")), manifest)
        return manifest

    def fetch(self, step: int) -> Path:
        manifest = self.look(step)
        self.clear("fetched")  # the step of an earlier call, or what could not be verified
        self.clear(PARTS)  # what killed saves have left: no step is loaded while another is saved
        target = self.path_of(manifest)
        target.mkdir(parents=True)
        check_room(target, manifest.num_bytes)
        for name in manifest.files:
            self.download(manifest, name, target)
        return target

    @read_again
    def download(self, manifest: Manifest, name: FileName, target: Path) -> None:
        try:
            self.folder.download(self.key(manifest.step, f"{manifest.folder}/{name}"), target / name)
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        check_files(target, replace(manifest, files={name: manifest.files[name]}))

    def path_of(self, manifest: Manifest) -> Path:
        assert manifest.folder is not None  # in S3
        return self.local / "fetched" / step_name(manifest.step) / manifest.folder

    def let_go(self, fetched: Path) -> None:
        shutil.rmtree(fetched)

    def clear(self, name: str) -> None:
        if (self.local / name).is_dir():
            shutil.rmtree(self.local / name)

    def scratch(self, step: int, num_bytes: int) -> Path:
        folder = self.local / SAVING / f"{step_name(step)}.{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        try:
            check_room(folder, num_bytes)
        except OSError:
            self.clear(SAVING)  # saves that could not be uploaded make room for a newer one
            folder.mkdir(parents=True)
            check_room(folder, num_bytes)
        return folder

    def begin_parts(self, manifest: Manifest, names: list[FileName]) -> Manifest:
        manifest = self.with_folder(manifest)
        self.mark(manifest, names)
        return manifest

    @contextmanager
    def part(self, scratch: str, manifest: Manifest, num_bytes: int) -> Iterator[Path]:
        folder = self.local / PARTS / uuid.uuid4().hex
        folder.mkdir(parents=True)
        try:
            check_room(folder, num_bytes)
            yield folder
        finally:
            shutil.rmtree(folder)

    def send_part(self, folder: Path, manifest: Manifest, names: list[FileName]) -> None:
        for name in names:
            self.folder.upload(self.key(manifest.step, f"{manifest.folder}/{name}"), folder / name)

    def keep(self, scratch: Path, manifest: Manifest) -> Manifest:
        if manifest.folder:
            return manifest  # the files of other ranks are not here: a copy would not be whole
        manifest = self.with_folder(manifest)  # each attempt to commit overwrites what the one before has uploaded
        write_atomic(scratch / FILE, manifest.to_json())
        for older in scratch.parent.iterdir():
            if older != scratch:
                shutil.rmtree(older)
        return manifest

    def with_folder(self, manifest: Manifest) -> Manifest:
        return replace(manifest, folder=FileName(f"{manifest.fence:08d}-{uuid.uuid4().hex[:8]}"))

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        """Raises LeaseLost, and commits nothing, if another job took the run folder during the upload."""
        manifest = manifest if manifest.folder else self.with_folder(manifest)
        with self.unfinished(manifest):
            self.send_part(scratch, manifest, [name for name in manifest.files if not is_part(name)])
            self.check_fence(manifest.fence)
            if not self.folder.create(self.key(manifest.step, FILE), manifest.to_json()):
                self.check_fence(manifest.fence)  # a step of a newer owner stays
                self.put_aside(manifest.step, "replaced")
                if not self.folder.create(self.key(manifest.step, FILE), manifest.to_json()):
                    raise FileExistsError(f"{self.location}/{step_name(manifest.step)}: another job writes it as well")
        shutil.rmtree(scratch)

    @contextmanager
    def unfinished(self, manifest: Manifest, *, removes: bool = False) -> Iterator[None]:
        """Mark the files of a manifest as leftovers, which they are if the work that is done meanwhile is cut off."""
        mark = self.mark(manifest, list(manifest.files), removes=removes)
        yield
        with suppress(InputError, Failure):  # the work is done; while its manifest is there a mark means nothing
            self.folder.remove(mark)

    def mark(self, manifest: Manifest, names: list[FileName], *, removes: bool = False) -> str:
        mark = self.key(manifest.step, f"{manifest.folder}.unfinished")
        self.folder.write(mark, canonical_json({"files": sorted(names), "removes": removes}))
        return mark

    def check_fence(self, fence: int) -> None:
        newest = max(numbers(self.folder), default=0)
        if newest > fence:
            raise LeaseLost(f"{self.folder.location} has a newer owner, by {name_of(newest)}: nothing is committed")

    def put_aside(self, step: int, why: str) -> str:
        target = f"manifest.{why}-{uuid.uuid4().hex[:8]}.json"
        self.folder.write(self.key(step, target), self.folder.read(self.key(step, FILE)))
        self.folder.remove(self.key(step, FILE))
        return f"{step_name(step)}/{target}"

    def remove(self, step: int) -> None:
        manifest = self.manifest(step)
        with self.unfinished(manifest, removes=True):
            self.folder.remove(self.key(step, FILE))  # first: from here on it is none
            for name in manifest.files:
                self.folder.remove(self.key(step, f"{manifest.folder}/{name}"))

    def collect_garbage(self, *, ended_below: int) -> None:
        """Remove files that a mark names and no manifest does, unless the save is complete. Marks of a lease that may
        not have ended stay: its owner may be about to commit.
        """
        self.clear("fetched")
        objects = self.names()
        self.tidy_saving(max((step for step, name in objects if name == FILE), default=0))
        left = []
        for found in self.leftovers(objects, range(ended_below)):
            if found.is_whole:  # it may have been committed, and only its manifest be lost
                left.append(found.step)
            else:
                self.remove_names(found.names)
        for step, names in by_step(objects):
            is_known = any(name == FILE or is_aside(name) or UNFINISHED.fullmatch(name) for name in names)
            if not is_known and any(map(WRITTEN.fullmatch, names)):
                left.append(step)
        if left:
            named = ", ".join(map(step_name, sorted(set(left))[:MAX_NAMED])) + (" ..." if left[MAX_NAMED:] else "")
            logger.warning(
                f"{self.location}: no {FILE} for the files of {named}: they do not count as checkpoints, and none is "
                "removed; `prune` of train.checkpoints removes those that a save of this run has left"
            )

    def remove_uncommitted(self, leases: range, *, dry: bool = False) -> list[str]:
        found = list(self.leftovers(self.names(), leases))
        for each in [] if dry else found:
            self.remove_names(each.names)
        return [f"{step_name(each.step)}/{each.folder}" for each in found if each.names[1:]]

    def remove_names(self, names: list[str]) -> None:
        for name in names:
            self.folder.remove(name)

    def tidy_saving(self, newest: int) -> None:
        """Remove what killed saves have left on this machine, and copies of steps that S3 has; name other copies."""
        for folder in (self.local / SAVING).glob("*"):
            step = None  # of a manifest that cannot be read
            with suppress(Damaged, OtherVersion):
                step = Manifest.from_json((folder / FILE).read_bytes()).step if (folder / FILE).is_file() else 0
            if step is not None and step <= newest:
                shutil.rmtree(folder)
            else:
                text = "docs/faults.md says how to upload it; the next save replaces it"
                logger.warning("%s holds a save that is not in S3: %s", folder, text)
        with suppress(OSError):  # it is not empty, or absent
            (self.local / SAVING).rmdir()

    def leftovers(self, objects: list[tuple[int, str]], leases: range) -> Iterator[Leftover]:
        """What the marks of these leases name. Steps of which a manifest was put aside are left out, because it may be
        unreadable, and marks that are not certainly of a save of ours.
        """
        for step, names in by_step(objects):
            for mark in filter(None, map(UNFINISHED.fullmatch, names)):
                if int(mark[2]) in leases and not any(map(is_aside, names)):
                    with suppress(Damaged, FileNotFoundError, BadContent):
                        yield self.leftover(step, mark[1], names)

    def leftover(self, step: int, folder: str, names: list[str]) -> Leftover:
        mark = self.key(step, f"{folder}.unfinished")
        if FILE in names and self.manifest(step).folder == folder:
            return Leftover(step, folder, [mark], is_whole=False)
        content = read_object(self.folder.read(mark))
        files = of_type(list[FileName], content.get("files"), "files")
        is_whole = FILE not in names and content.get("removes") is not True
        is_whole = is_whole and all(f"{folder}/{name}" in names for name in files)
        return Leftover(step, folder, [*(self.key(step, f"{folder}/{name}") for name in files), mark], is_whole)


class Leftover(NamedTuple):
    """What a save that was not committed, or a removal that was cut off, has left."""

    step: int
    folder: str
    names: list[str]  # to be removed in this order; the mark is the last
    is_whole: bool  # no file is missing but a manifest


def by_step(objects: list[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    for step in sorted({step for step, _ in objects}):
        yield step, [name for number, name in objects if number == step]


def is_aside(name: str) -> bool:
    return name.startswith("manifest.") and name != FILE
