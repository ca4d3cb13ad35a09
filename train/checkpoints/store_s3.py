"""Checkpoints in S3. There is no rename: files go under names of their own, and the manifest is created last."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

from tenacity import retry, retry_if_exception_type, stop_after_attempt

from train import lease
from train.checkpoints import unsent
from train.checkpoints.manifest import (
    FILE,
    Damaged,
    Manifest,
    check_files,
    check_sizes,
    step_name,
    step_of,
)
from train.checkpoints.store import check_room
from train.s3 import S3Folder
from train.storage import READS

logger = logging.getLogger("train")
PREFIX = "checkpoints/"
PLAIN = re.compile(r"\w[\w.-]*")  # names that lead nowhere else on this machine's disk

read_again = retry(retry=retry_if_exception_type(Damaged), stop=stop_after_attempt(READS), reraise=True)


class S3Store:
    """See `train.checkpoints.store.Store`. No LATEST: a hint is not worth a commit that fails after it was done.

    checkpoints/step_00001000/manifest.json                  its creation is the commit
    checkpoints/step_00001000/00000007-5f0c1a2b/model.pt     lease number and a random one: no two writers meet
    checkpoints/step_00001000/manifest.damaged-9e1f.json     put aside, with the files it names

    Parts of a large file whose upload was killed are in no listing, yet they are paid for: a lifecycle rule of the
    bucket removes them (AbortIncompleteMultipartUpload).
    """

    def __init__(self, folder: S3Folder, scratch: Path) -> None:
        self.folder, self.local = folder, scratch
        self.location = f"{folder.location}/checkpoints"

    def key(self, step: int, name: str) -> str:
        return f"{PREFIX}{step_name(step)}/{name}"

    def names(self) -> list[tuple[int, str]]:
        """Step and name below it of all objects."""
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
        if manifest.step != step:
            raise Damaged(f"{FILE} is of step {manifest.step}")
        if not all(map(PLAIN.fullmatch, (manifest.folder, *manifest.files))):
            raise Damaged(f"{FILE} names files that no checkpoint has")
        return manifest

    def look(self, step: int) -> Manifest:
        manifest = self.manifest(step)
        places = {name: self.key(step, f"{manifest.folder}/{name}") for name in manifest.files}
        check_sizes({name: self.folder.size(place) for name, place in places.items()}, manifest)
        return manifest

    def fetch(self, step: int) -> Path:
        manifest = self.look(step)
        self.clear("fetched")  # what an earlier call gave, or could not verify
        target = self.place(manifest)
        target.mkdir(parents=True)
        check_room(target, manifest.num_bytes)
        for name in manifest.files:
            self.download(manifest, name, target)
        return target

    @read_again
    def download(self, manifest: Manifest, name: str, target: Path) -> None:
        try:
            self.folder.download(self.key(manifest.step, f"{manifest.folder}/{name}"), target / name)
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        check_files(target, replace(manifest, files={name: manifest.files[name]}))

    def place(self, manifest: Manifest) -> Path:
        return self.local / "fetched" / step_name(manifest.step) / manifest.folder

    def let_go(self, fetched: Path) -> None:
        shutil.rmtree(fetched)

    def clear(self, name: str) -> None:
        if (self.local / name).is_dir():
            shutil.rmtree(self.local / name)

    def scratch(self, step: int, num_bytes: int) -> Path:
        folder = self.local / unsent.SAVING / uuid.uuid4().hex
        folder.mkdir(parents=True)
        try:
            check_room(folder, num_bytes)
        except OSError:
            self.clear(unsent.SAVING)  # what could not be uploaded makes room for what is newer
            folder.mkdir(parents=True)
            check_room(folder, num_bytes)
        return folder

    def keep(self, scratch: Path, manifest: Manifest) -> Manifest:
        manifest = self.with_folder(manifest)  # the same at each attempt: what was uploaded before is written over
        unsent.keep(scratch, manifest)
        return manifest

    def with_folder(self, manifest: Manifest) -> Manifest:
        return replace(manifest, folder=f"{manifest.fence:08d}-{uuid.uuid4().hex[:8]}")

    def send_kept(self, fence: int) -> None:
        for folder, manifest in unsent.to_send(self.local, fence):
            if manifest.step > max(self.steps(), default=0):
                logger.info("uploading the save of step %d, which was kept in %s", manifest.step, folder)
                self.commit(folder, self.with_folder(manifest))

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        """Raises LeaseLost, with nothing committed, if the run folder was taken over while the files went up."""
        manifest = manifest if manifest.folder else self.with_folder(manifest)
        for name in manifest.files:
            self.folder.upload(self.key(manifest.step, f"{manifest.folder}/{name}"), scratch / name)
        self.check_fence(manifest.fence)
        if not self.folder.create(self.key(manifest.step, FILE), manifest.to_json()):
            self.check_fence(manifest.fence)  # what a newer owner has committed stays
            self.put_aside(manifest.step, "replaced")
            if not self.folder.create(self.key(manifest.step, FILE), manifest.to_json()):
                raise FileExistsError(f"{self.location}/{step_name(manifest.step)}: another job writes it as well")
        shutil.rmtree(scratch)

    def check_fence(self, fence: int) -> None:
        own = lease.name_of(fence)
        newer = [name for name in self.folder.names(lease.PREFIX) if len(name) == len(own) and name > own]
        if newer:
            raise lease.LeaseLost(f"{self.folder.location} has a newer owner, by {max(newer)}: nothing is committed")

    def put_aside(self, step: int, why: str) -> str:
        target = f"manifest.{why}-{uuid.uuid4().hex[:8]}.json"
        self.folder.write(self.key(step, target), self.folder.read(self.key(step, FILE)))
        self.folder.remove(self.key(step, FILE))
        return f"{step_name(step)}/{target}"

    def remove(self, step: int) -> None:
        manifest = self.manifest(step)
        self.folder.remove(self.key(step, FILE))  # first: from here on it is none
        for name in manifest.files:
            self.folder.remove(self.key(step, f"{manifest.folder}/{name}"))

    def collect_garbage(self) -> None:
        """Files that no manifest names. Where something was put aside all stays, its manifest may not be readable."""
        self.clear(unsent.SAVING)
        self.clear("fetched")
        found = self.names()
        for step in {step for step, _ in found}:
            names = [name for number, name in found if number == step]
            if any(map(is_aside, names)):
                continue
            try:
                named = self.manifest(step).folder if FILE in names else ""
            except Damaged:
                continue
            for name in names:
                if name != FILE and not (named and name.startswith(f"{named}/")):
                    self.folder.remove(self.key(step, name))


def is_aside(name: str) -> bool:
    return name.startswith("manifest.") and name != FILE
