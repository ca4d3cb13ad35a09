"""Write a step: every rank the files of its part of the state, rank 0 the manifest, once all of them are there.

It goes on in the threads that save, one of each rank, which talk in a group of their own: rank 0 makes the folder and
shares its name, every rank writes, and rank 0 gathers lengths and checksums. A rank whose part is not there makes the
save fail. An engine that splits nothing has its whole state on rank 0: then nobody else takes part, and nobody talks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from train.checkpoints.manifest import FILE, Manifest, file_name
from train.checkpoints.staging import State, first_not_finite, num_bytes_of
from train.checkpoints.store import Store
from train.config import InputError, Unreachable
from train.storage.schema import FileEntry, FileName, Sha256

if TYPE_CHECKING:
    from train.backend import Backend
    from train.ranks import World

logger = logging.getLogger("train")
UNSENT = (InputError, Unreachable)  # a service that is away or refuses: what it did not take may be given to it later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # at most, between attempts to commit: random, doubling
Files = dict[FileName, FileEntry]
Result = TypeVar("Result")


class Writer:
    """All ranks make one and call `open`. Then the save threads call `publish` on rank 0, `write_part` on the others if
    `is_split`, for the same steps.
    """

    def __init__(self, store: Store, backend: Backend, may_commit: Callable[[], None]) -> None:
        self.store, self.backend, self.may_commit = store, backend, may_commit
        self.rank = backend.world.rank
        self.writers: World | None = None
        self.kept: tuple[int, Path] | None = None  # step and copy of a save that could not be committed

    def open(self, part: State) -> None:
        """Find out, at the first call, whether other ranks than rank 0 have a part of the state."""
        if self.writers is None:
            world = self.backend.world
            is_split = world.sum([self.rank != 0 and bool(part)])[0] > 0
            self.writers = world.beside(self.backend.subgroup(list(range(world.size))) if is_split else None)

    @property
    def is_split(self) -> bool:
        return self.writers is not None and self.writers.is_distributed

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def publish(self, state: State, manifest: Manifest, patience_s: float) -> int:
        """Write a step and commit it, or leave nothing of it. Gives its bytes."""
        scratch, manifest = self._begin(state, manifest, patience_s)
        try:
            files = self._all_write(lambda: self._write(state, scratch))
            manifest = self.store.keep(scratch, replace(manifest, files=files))
            self._patiently(lambda: self._commit(scratch, manifest), manifest.step, patience_s)
        except BaseException as error:
            if isinstance(error, UNSENT) and (scratch / FILE).is_file():
                self.kept = manifest.step, scratch
            elif scratch.is_dir():
                shutil.rmtree(scratch)
            raise
        self.kept = None
        return manifest.num_bytes

    def _begin(self, state: State, manifest: Manifest, patience_s: float) -> tuple[Path, Manifest]:
        assert self.writers is not None
        names = [name for own in self.writers.gather(self._names(state)) for name in own]
        draft = None
        try:
            if self.is_split:
                begun = partial(self.store.begin_parts, manifest, names)
                manifest = self._patiently(begun, manifest.step, patience_s)
            scratch = self.store.scratch(manifest.step, num_bytes_of(state))
            draft = scratch.name, manifest
        finally:
            self.writers.all_gather_object(draft)  # None: the other ranks have nothing to write
        return scratch, manifest

    def _commit(self, scratch: Path, manifest: Manifest) -> None:
        self.may_commit()
        self.store.commit(scratch, manifest)

    @property
    def kept_text(self) -> str:
        if self.kept is None or not (self.kept[1] / FILE).is_file():  # it may have made room for a newer one
            return ""
        step, folder = self.kept
        return f"; step {step} is whole in {folder}; docs/faults.md says how to upload it"

    # ---- the other ranks -----------------------------------------------------------------------------------------

    def write_part(self, state: State, patience_s: float) -> None:
        """Write this rank's files of the step that rank 0 is writing. Rank 0 reports a failure."""
        assert self.writers is not None
        try:
            self.writers.gather(self._names(state))
            draft = self.writers.broadcast(None)
            if draft is not None:
                self._all_write(lambda: self._write_beside(state, *draft, patience_s))
        except Exception as error:
            logger.error("this rank's part of a checkpoint: %s: %s", type(error).__name__, error)

    def _write_beside(self, state: State, scratch: str, manifest: Manifest, patience_s: float) -> Files:
        if not state:
            return {}
        with self.store.part(scratch, manifest, num_bytes_of(state)) as folder:
            files = self._write(state, folder)
            self._patiently(lambda: self.store.send_part(folder, manifest, list(files)), manifest.step, patience_s)
        return files

    # ---- all of them ---------------------------------------------------------------------------------------------

    def _all_write(self, write: Callable[[], Files]) -> Files:
        """Write on every rank. Gives the files of all ranks on rank 0, which raises the failure of any; others raise
        their own.
        """
        assert self.writers is not None
        files: Files = {}
        failure: Exception | None = None
        try:
            files = write()
        except Exception as error:  # raised below: rank 0 waits for the answer
            failure = error
        answers = self.writers.gather((files, failure and f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                raise RuntimeError(f"rank {rank}: {text}")
        return {name: entry for own, _ in answers for name, entry in own.items()}

    def _patiently(self, action: Callable[[], Result], step: int, patience_s: float) -> Result:
        """Take an action, and retry it for `patience_s` if the service does not answer."""

        def warn(state: RetryCallState) -> None:
            error, left_s = state.outcome and state.outcome.exception(), patience_s - (state.seconds_since_start or 0)
            logger.warning("saving step %d: %s; tried again for up to %.0f s", step, error, left_s)

        retry = Retrying(
            retry=retry_if_exception_type(UNSENT),
            stop=stop_after_delay(patience_s),
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before_sleep=warn,
            reraise=True,
        )
        return retry(action)

    def _names(self, state: State) -> list[FileName]:
        return [file_name(content, self.rank) for content in state]

    def _write(self, state: State, folder: Path) -> Files:
        name = first_not_finite({"weights": state.get("model"), "moments": state.get("optimizer")})
        if name is not None:
            raise FloatingPointError(f"{name} is no longer finite; such a state is not saved")
        names = zip(self._names(state), state.values(), strict=True)
        return {name: self._write_file(content, folder / name) for name, content in names}

    def _write_file(self, content: State, path: Path) -> FileEntry:
        with path.open("wb") as raw:
            file = Hashing(raw)
            try:
                self.backend.save(content, file)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise file.refusal or error from None  # torch's own error is about its archive: "unexpected pos"
            raw.flush()
            os.fsync(raw.fileno())
        return {"bytes": file.num_bytes, "sha256": Sha256(file.digest.hexdigest())}


class Hashing:
    """A file that computes the checksum of the bytes it is given, whatever the disk then makes of them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.num_bytes = file, hashlib.sha256(), 0
        self.refusal: OSError | None = None  # the disk's error

    def write(self, content: bytes | memoryview) -> int:
        self.digest.update(content)
        self.num_bytes += memoryview(content).nbytes
        try:
            return self.file.write(content)
        except OSError as error:
            self.refusal = error
            raise

    def flush(self) -> None:
        self.file.flush()
