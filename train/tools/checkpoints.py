"""The command `baretrain checkpoints RUN [list | verify | export]`, which looks into a run's checkpoints."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from train.checkpoints import open_store
from train.checkpoints.manifest import Damaged, Manifest, chosen_at, step_name
from train.checkpoints.retention import best
from train.checkpoints.store import Store
from train.config import InputError, S3Config, check, shortlist
from train.machine import host
from train.machine.console import say
from train.observe.report.texts import aligned
from train.run.command import (
    DONE,
    FAILED,
    REJECTED,
    add_s3_flags,
    command_parser,
    run_flags,
)
from train.run.saved import read_config
from train.storage.atomic_io import discard
from train.storage.folders import Folder, LocalFolder, local_path, make_folder, open_folder

COLUMNS = ("step", "size", "score", "ranks", "backend", "lease", "state")


@contextmanager
def opened(folder: Folder, cache_dir: str | None) -> Iterator[Store]:
    """Open a run folder's checkpoints. Those in S3 are fetched into a temporary folder, one step at a time."""
    if isinstance(folder, LocalFolder):
        yield open_store(folder, folder.path)
        return
    cache = host.cache_root()
    if cache_dir:
        cache = local_path(cache_dir)
    with tempfile.TemporaryDirectory(
        prefix="checkpoints-", dir=make_folder(cache), ignore_cleanup_errors=True
    ) as scratch:
        yield open_store(folder, Path(scratch))


def fetch(store: Store, step: int, content: str | None = None) -> Path:
    """Fetch a step's files, or only those with `content`, verify them, and return their folder.

    Raises InputError if there is no such step or the disk cannot hold it, and Damaged if a checksum is wrong.
    """
    check_step(store, step)
    try:
        wanted = None
        if content is not None:
            wanted = store.manifest(step).files_of(content)
        return store.fetch(step, wanted)
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}; choose another disk with --cache-dir"
        ) from error
    except Damaged as error:
        raise Damaged(f"step {step}: {error}") from error


def check_step(store: Store, step: int) -> None:
    """Raise InputError if the store does not have the step."""
    steps = store.steps()
    check(
        step in steps,
        f"there is no step {step} in {store.location}; there are: {shortlist(steps) or '-'}",
    )


# ---- list ----------------------------------------------------------------------------------------------------------


def table(store: Store) -> Iterator[str]:
    """Yield the lines of `list`, one per step. Only manifests and file lengths are read."""
    whole, damaged = store.look_at_all()
    rows = {step: [*row(manifest), "unverified"] for step, manifest in whole.items()}
    rows |= {step: [str(step), *"-----", f"damaged: {error}"] for step, error in damaged.items()}
    names = {"newest": max(whole, default=None), "best": best(whole)}
    for step, cells in rows.items():
        marks = [name for name, marked in names.items() if marked == step]
        if marks:
            cells[-1] += f"  ({', '.join(marks)})"
    if rows:
        yield from aligned([list(COLUMNS), *(rows[step] for step in sorted(rows))])
    else:
        yield f"{store.location}: no checkpoint"
    for name in store.quarantined():
        yield f"in quarantine: {name}"
    for name in store.leftovers():
        yield f"not committed: {name}, from a running or an abandoned save"


def row(manifest: Manifest) -> list[str]:
    score = "-"
    if manifest.metric is not None:
        score = f"{abs(manifest.metric):.4f}"
    numbers = [str(manifest.step), size(manifest), score, str(manifest.world_size)]
    return [*numbers, manifest.backend, str(manifest.fence)]


def size(manifest: Manifest) -> str:
    return f"{manifest.num_bytes / 1e6:,.1f} MB"


# ---- verify --------------------------------------------------------------------------------------------------------


def verify(store: Store, step: int | None) -> int:
    """Read a step, or all steps, and compare the checksums. Prints a line per step and returns the exit code."""
    steps = store.steps()
    if step is not None:
        steps = [step]
    valid = []
    for each in steps:
        try:
            store.release(fetch(store, each))
        except Damaged as error:
            say(f"{step_name(each)}  damaged: {str(error).removeprefix(f'step {each}: ')}")
        else:
            say(f"{step_name(each)}  valid, {size(store.manifest(each))}")
            valid.append(each)
    is_lost = not valid and bool(steps or store.quarantined())
    if step is None:
        start = "begins from scratch: there is no checkpoint"
        if valid:
            start = f"resumes from step {valid[-1]}"
        elif is_lost:
            start = "fails: there are checkpoints, but none is valid"
        say(f"the next start {start}")
    if is_lost or len(valid) < len(steps):
        return FAILED
    return DONE


# ---- export, which needs torch -------------------------------------------------------------------------------------


def export(folder: Folder, store: Store, options: argparse.Namespace, s3: S3Config) -> int:
    from train.checkpoints.export import export_step  # torch and transformers take long to import

    target = local_path(options.folder)
    check(not target.is_file(), f"{target} is a file; choose another folder")
    is_new = not target.exists() or not any(target.iterdir())
    check(is_new, f"{target} is not empty; choose another folder")
    cfg = read_config(folder)
    cfg.data.cache_dir, cfg.s3 = options.cache_dir, s3
    step, why = chosen(store, options.step)
    path = fetch(store, step, "model")
    existed = target.exists()
    try:
        settings = chosen_at(step, store.look_at_all()[0])
        export_step(path, store.manifest(step), cfg, target, run=folder, chosen=settings)
    except BaseException:
        # the next export needs an empty folder
        for made in target.iterdir() if existed else [target]:
            discard(made)
        raise
    store.release(path)
    say(f"{target}: step {step}, {why}; load it with transformers' from_pretrained")
    return DONE


def chosen(store: Store, step: int | None) -> tuple[int, str]:
    """Return the step to export, and the reason: it was requested, or is the best or the newest."""
    if step is not None:
        check_step(store, step)
        return step, "as requested"
    whole, damaged = store.look_at_all()
    for damaged_step, error in damaged.items():
        say(f"skipped: step {damaged_step}: {error}", file=sys.stderr)
    check(
        bool(whole),
        f"{store.location} has no valid checkpoint; the verify command says what is wrong",
    )
    best_step = best(whole)
    if best_step is None:
        return max(whole), "the newest (none was evaluated)"
    name = whole[best_step].settings.get("best.metric", "loss")
    score = whole[best_step].metric
    if score is not None:
        name = f"{name} {abs(score):.4f}"
    return best_step, f"the best (validation {name})"


# ---- command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(
        "checkpoints",
        "Inspect the checkpoints of a run, on disk or in S3.",
        examples=(
            "runs/mine",
            "s3://bucket/runs/mine verify",
            "runs/mine export FOLDER --step 1000",
        ),
        exits={
            DONE: "done",
            FAILED: "a checkpoint is damaged, or S3 did not answer",
            REJECTED: "arguments rejected",
        },
        imports=True,
    )
    parser.add_argument(
        "run", metavar="RUN", help="run_dir of a run: a folder or s3://bucket/prefix"
    )
    what = "list the steps (the default); compare files with checksums, and say where the next start resumes; "
    parser.add_argument(
        "command",
        nargs="?",
        choices=("list", "verify", "export"),
        default="list",
        help=f"{what}write a step as a Hugging Face folder, with the tokenizer",
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="for export: new or empty")
    parser.add_argument(
        "--step",
        type=int,
        help="for verify: only this step; for export (default: the best, or the newest if none was evaluated)",
    )
    parser.add_argument(
        "--data",
        metavar="LOCATION",
        help="for export: location of the prepared data, if RUN has no model/ folder",
    )
    add_s3_flags(parser)
    return run_flags(parser, arguments, look)


def look(options: argparse.Namespace, s3: S3Config) -> int:
    is_export = options.command == "export"
    check(
        is_export == (options.folder is not None),
        "export needs a FOLDER, and the other commands none",
    )
    folder = open_folder(options.run, s3)
    is_run = bool(folder.names_here() & {"environment.json", "checkpoints"})
    check(
        is_run,
        f"{options.run} is not a run folder: it has no environment.json; give the run_dir of a run",
    )
    try:
        with opened(folder, options.cache_dir) as store:
            if options.command == "verify":
                return verify(store, options.step)
            if is_export:
                return export(folder, store, options, s3)
            for line in table(store):
                say(line)
    except Damaged as error:
        say(f"error: {error}", file=sys.stderr)
        return FAILED
    return DONE
