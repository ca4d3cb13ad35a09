"""Checkpoints in S3. There is no rename: files go under names of their own, and the manifest is created last."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import replace
from pathlib import Path

from train.checkpoints.manifest import (
    FILE,
    LATEST,
    Damaged,
    Manifest,
    check_files,
    check_sizes,
    step_name,
    step_of,
)
from train.checkpoints.store import check_room
from train.s3 import S3Folder

PREFIX = "checkpoints/"


class S3Store:
    """See `train.checkpoints.store.Store`.

    checkpoints/step_00001000/manifest.json                  its creation is the commit
    checkpoints/step_00001000/00000007-5f0c1a2b/model.pt     lease number and a random one: no two writers meet
    checkpoints/step_00001000/manifest.damaged-9e1f.json     put aside, with the files it names
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

    def manifest(self, step: int) -> Manifest:
        try:
            manifest = Manifest.from_json(self.folder.read(self.key(step, FILE)))
        except FileNotFoundError as error:
            raise Damaged(f"{FILE} is missing") from error
        if manifest.step != step:
            raise Damaged(f"{FILE} is of step {manifest.step}")
        return manifest

    def look(self, step: int) -> Manifest:
        manifest = self.manifest(step)
        places = {name: self.key(step, f"{manifest.folder}/{name}") for name in manifest.files}
        check_sizes({name: self.folder.size(place) for name, place in places.items()}, manifest)
        return manifest

    def fetch(self, step: int) -> Path:
        manifest = self.look(step)
        target = self.place(manifest)
        if target.is_dir():
            shutil.rmtree(target)
        target.mkdir(parents=True)
        check_room(target, manifest.num_bytes)
        for name in manifest.files:
            try:
                self.folder.download(self.key(step, f"{manifest.folder}/{name}"), target / name)
            except FileNotFoundError as error:
                raise Damaged(f"{name} is missing") from error
        check_files(target, manifest)
        return target

    def place(self, manifest: Manifest) -> Path:
        return self.local / "fetched" / step_name(manifest.step) / manifest.folder

    def let_go(self, fetched: Path) -> None:
        shutil.rmtree(fetched)

    def scratch(self, step: int, num_bytes: int) -> Path:
        folder = self.local / "saving" / uuid.uuid4().hex
        folder.mkdir(parents=True)
        check_room(folder, num_bytes)
        return folder

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        manifest = replace(manifest, folder=f"{manifest.fence:08d}-{uuid.uuid4().hex[:8]}")
        for name in manifest.files:
            self.folder.upload(self.key(manifest.step, f"{manifest.folder}/{name}"), scratch / name)
        if not self.folder.create(self.key(manifest.step, FILE), manifest.to_json()):
            self.put_aside(manifest.step, "replaced")
            if not self.folder.create(self.key(manifest.step, FILE), manifest.to_json()):
                raise FileExistsError(f"{self.location}/{step_name(manifest.step)}: another job writes it as well")
        shutil.rmtree(scratch)
        self.folder.write(f"{PREFIX}{LATEST}", f"{step_name(manifest.step)}\n".encode())

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
        for name in ("saving", "fetched"):
            if (self.local / name).is_dir():
                shutil.rmtree(self.local / name)
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
