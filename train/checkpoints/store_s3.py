"""Checkpoints in S3. As S3 has no rename, each save's files have unique names, and the manifest is created last."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from tenacity import retry, retry_if_exception_type, stop_after_attempt

from train.checkpoints.manifest import (
    FILE,
    Damaged,
    Manifest,
    OtherVersion,
    step_name,
    step_of,
)
from train.checkpoints.store import Store, compare_sizes
from train.run_folder.ownership import LeaseLost, lease_name, lease_numbers
from train.storage.atomic_io import discard
from train.storage.checksums import fault_of
from train.storage.folders import at_once, check_space, sha256_file
from train.storage.s3 import S3Folder
from train.storage.schema import FileName, Head

PREFIX = "checkpoints/"
SAVING = "saving"  # local folder for files that are being saved
# a file of a save, by its name below the step
OF_SAVE = re.compile(r"(?P<save>(?P<lease>\d{8,18})-[0-9a-f]{8})/[^/]+")
DOWNLOADS = 8  # files downloaded at the same time, each over several connections
READS = 3  # a file counts as damaged if it does not match its checksum this many times
read_again = retry(
    retry=retry_if_exception_type(Damaged), stop=stop_after_attempt(READS), reraise=True
)


class S3Store(Store):
    """Checkpoints in S3.

    checkpoints/step_00001000/manifest.json                  its creation is the commit
    checkpoints/step_00001000/00000007-5f0c1a2b/model.pt     lease number and a random number: unique to a save
    checkpoints/step_00001000/manifest.damaged-9e1f.json     a manifest in quarantine; its files are kept

    The files of a save that no manifest of its step names are garbage once the owner with its lease number has ended.
    All other objects are kept.
    """

    def __init__(self, folder: S3Folder, scratch: Path) -> None:
        self.folder = folder
        self.local = scratch
        self.location = f"{folder.location}/checkpoints"

    def key(self, step: int, name: str) -> str:
        return f"{PREFIX}{step_name(step)}/{name}"

    def file_key(self, manifest: Manifest, name: str) -> str:
        return self.key(manifest.step, below(manifest, name))

    def objects(self, prefix: str = "step_") -> dict[int, dict[str, Head]]:
        """Return the objects of each step, by their names relative to the step."""
        steps: dict[int, dict[str, Head]] = {}
        for name, item in self.folder.listing(PREFIX + prefix).items():
            folder, _, below = name.removeprefix(PREFIX).partition("/")
            step = step_of(folder)
            if step is not None and folder == step_name(step):
                steps.setdefault(step, {})[below] = item
        return steps

    def steps(self) -> list[int]:
        return sorted(step for step, objects in self.objects().items() if FILE in objects)

    def quarantined(self) -> list[str]:
        names = []
        for step, objects in self.objects().items():
            for name in filter(in_quarantine, objects):
                names.append(f"{step_name(step)}/{name}")
        return names

    @read_again
    def manifest(self, step: int) -> Manifest:
        try:
            return Manifest.from_json(self.folder.read(self.key(step, FILE)), step=step)
        except FileNotFoundError as error:
            raise Damaged(f"{FILE} is missing") from error

    def look(self, step: int) -> Manifest:
        objects = self.objects(f"{step_name(step)}/").get(step, {})
        manifest = self.manifest(step)
        sizes = {}
        for name in manifest.files:
            found = objects.get(below(manifest, name))
            sizes[name] = found and found.size
        compare_sizes(manifest, sizes)
        return manifest

    def fetch(self, step: int, names: Collection[str] | None = None) -> Path:
        manifest = self.look(step).only(names)
        self.clear("fetched")  # removes the files of earlier calls, valid or not
        self.clear(SAVING)  # contains only leftovers of killed saves: no save runs during a load
        target = self.path_of(manifest)
        target.mkdir(parents=True, exist_ok=True)  # files that cannot be removed are overwritten
        check_space(target, manifest.num_bytes)
        for _ in at_once(
            lambda name: self.download(manifest, name, target), manifest.files, DOWNLOADS
        ):
            pass
        return target

    @read_again
    def download(self, manifest: Manifest, name: FileName, target: Path) -> None:
        path = target / name
        try:
            self.folder.download(self.file_key(manifest, name), path)
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        # An error of this copy's disk is not one of the checkpoint.
        size = path.stat().st_size
        fault = fault_of(manifest.files[name], size, lambda: sha256_file(path))
        if fault is not None:
            raise Damaged(f"{name} {fault}")

    def path_of(self, manifest: Manifest) -> Path:
        return self.local / "fetched" / step_name(manifest.step) / (manifest.folder or "files")

    def release(self, fetched: Path) -> None:
        discard(fetched)

    def clear(self, name: str) -> None:
        discard(self.local / name)

    def begin(self, step: int, num_bytes: int) -> Path:
        return self.join(step_name(step), num_bytes)

    def join(self, name: str, num_bytes: int) -> Path:
        folder = self.local / SAVING / uuid.uuid4().hex
        folder.mkdir(parents=True)
        check_space(folder, num_bytes)
        return folder

    def prepare(self, manifest: Manifest) -> Manifest:
        return replace(manifest, folder=FileName(f"{manifest.fence:08d}-{uuid.uuid4().hex[:8]}"))

    def send(self, folder: Path, manifest: Manifest, names: list[FileName]) -> None:
        for name in names:
            self.folder.upload(self.file_key(manifest, name), folder / name)

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        # If another job took the run folder during the upload, this raises LeaseLost and commits nothing.
        self.check_fence(manifest.fence)
        if self.create(manifest):
            return
        self.check_fence(manifest.fence)  # never replace a step of a newer owner
        self.quarantine(manifest.step, "replaced")
        if not self.create(manifest):
            where = f"{self.location}/{step_name(manifest.step)}"
            raise FileExistsError(f"{where}: another job is writing it too")

    def create(self, manifest: Manifest) -> bool:
        return self.folder.create(self.key(manifest.step, FILE), manifest.to_json())

    def check_fence(self, fence: int) -> None:
        newest = max(lease_numbers(self.folder), default=0)
        if newest > fence:
            raise LeaseLost(
                f"{self.folder.location} has a newer owner, {lease_name(newest)}: nothing is committed"
            )

    def quarantine(self, step: int, why: str) -> str:
        manifest = self.key(step, FILE)
        target = f"manifest.{why}-{uuid.uuid4().hex[:8]}.json"
        self.folder.write(self.key(step, target), self.folder.read(manifest))
        self.folder.remove(manifest)
        return f"{step_name(step)}/{target}"

    def remove(self, step: int) -> None:
        manifest = self.manifest(step)
        # The manifest goes first: without it, there is no checkpoint.
        self.folder.remove(self.key(step, FILE))
        self.remove_all(self.file_key(manifest, name) for name in manifest.files)

    def remove_all(self, names: Iterable[str]) -> None:
        for _ in at_once(self.folder.remove, names):
            pass

    def collect_garbage(self, *, ended_below: int) -> list[str]:
        self.clear("fetched")
        self.clear(SAVING)
        return self.remove_uncommitted(range(ended_below))

    def remove_uncommitted(self, leases: range, *, dry: bool = False) -> list[str]:
        left = []
        for step, objects in self.objects().items():
            saves: dict[str, list[str]] = {}
            for name in objects:
                match = OF_SAVE.fullmatch(name)
                if match and int(match["lease"]) in leases:
                    saves.setdefault(match["save"], []).append(self.key(step, name))
            if saves:
                for save in self.uncommitted(step, objects, saves):
                    left.append(f"{step_name(step)}/{save}")
                    if not dry:
                        self.remove_all(saves[save])
        return left

    def uncommitted(
        self, step: int, objects: Collection[str], saves: Iterable[str]
    ) -> Iterable[str]:
        """Return those of a step's saves that its manifest does not name; none if that is in doubt."""
        # A manifest in quarantine, or one that cannot be read, may name any of them.
        if any(map(in_quarantine, objects)):
            return []
        if FILE not in objects:
            return saves
        try:
            committed = self.manifest(step).folder
        except (Damaged, OtherVersion):
            return []
        return [save for save in saves if save != committed]


def below(manifest: Manifest, name: str) -> str:
    """Return a file's name relative to its step. A step that was copied from a disk has no folder per save."""
    if manifest.folder:
        return f"{manifest.folder}/{name}"
    return name


def in_quarantine(name: str) -> bool:
    return name.startswith("manifest.") and name != FILE
