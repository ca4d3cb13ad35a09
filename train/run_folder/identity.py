"""The identity of a run: the settings that a resume must keep, and the files that mark a run folder.

A run folder contains environment.json, which describes the run, or at least a lease. An empty folder may become a run
folder. Importing this does not import torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from train.config import Plan, TrainConfig, check, to_dict
from train.run_folder.lease import LEASE_FILE, name_of, numbers, parse
from train.storage import imported
from train.storage.folders import Folder, canonical_json, disk_errors, local_path
from train.storage.schema import BadContent, read_object

logger = logging.getLogger("train")

ENVIRONMENT = "environment.json"
FILES = (ENVIRONMENT, "config.yaml", "data.json", "metrics.jsonl", "outcome.json", "samples.json")
FOLDERS = ("checkpoints", "export", "lease", "log", "model", "predictions", "tensorboard")
# files changed in place, not replaced
WRITTEN = re.compile(r"checkpoints|lease|log|metrics\.jsonl|rank_\d{4,}\.txt")
# Settings of the model and the optimizer that a resume may change. The first only selects an implementation. The second
# only changes the end of a run: `check_continues` in train/parallel/optim.py rejects a change to earlier steps.
FREE = ("model.attention", "optim.decay_fraction")
IDENTITY_KEYS = {"data", "seed", "global_batch_size"}
# These files are written by other ranks before rank 0 has taken the folder, exist on every new disk, or are those of
# file managers, or the output of a job that a scheduler or a shell has already opened.
NEUTRAL = re.compile(
    rf"{LEASE_FILE.pattern}|log/(rank|exit_rank|stacks_rank)_\d{{4,}}\.(txt|json)|\.write-test-\w+|lost\+found"
    r"|\.DS_Store|\._.*|Thumbs\.db|desktop\.ini|\.directory|\.nfs\w+|\.fuse_hidden\w+|\.Trash-\d+|\.snapshot"
    r"|\.(git)?keep|\.ipynb_checkpoints|[\w .%@+-]+\.(out|err|log)|[\w.+-]+\.[oe]\d+(-\d+)?"
)


def identity_of(
    cfg: TrainConfig, plan: Plan, data_id: str, lengths: Sequence[int] | None
) -> dict[str, Any]:
    """Return the settings that a resume must keep, by their full names."""
    plain = to_dict(cfg)
    sections = {
        f"{name}.{key}": value
        for name in ("task", "model", "optim")
        for key, value in plain[name].items()
    }
    for key in FREE:
        del sections[key]
    return {
        "data": data_id,
        "seed": cfg.seed,
        "global_batch_size": plan.global_batch_size,
        **sections,
        **imported.identity(),
        **(
            {} if lengths is None else {"data.lengths": list(lengths)}
        ),  # the order of rows depends on the lengths
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return "key: old -> new" for each key whose value differs between `before` and `now`."""
    now = json.loads(canonical_json(now))
    keys = sorted({**before, **now})
    return [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def check_same_run(
    before: dict[str, Any], identity: dict[str, Any], *, source: object, force: bool
) -> None:
    """Compare `identity` with `before`, read from `source`. If they differ, raise InputError, or warn if `force`."""
    # drops new settings that are off
    known = {key: value for key, value in identity.items() if key in before or value}
    changed = differences(before, known)
    if changed and force:
        logger.warning(
            "resume.force=true: resuming although the run differs from %s: %s",
            source,
            ", ".join(changed),
        )
        return
    imported.check_repeated(before, source)
    lengths = ",".join(map(str, before.get("data.lengths") or ()))
    is_same = not any(each.startswith("data.lengths: ") for each in changed)
    hint = (
        ""
        if is_same
        else f"; data.lengths=[{lengths}] keeps that run's batches (the default depends on the device)"
    )
    check(
        not changed,
        f"{source} belongs to another run ({', '.join(changed)}); choose another run_dir, or set "
        f"resume.force=true to resume with the new settings{hint}",
    )


# ---- is it a run folder? --------------------------------------------------------------------------------------------


def check_layout(location: str) -> None:
    """Raise InputError if an entry of the folder is a link to a file, of the wrong kind, or not writable."""
    path = local_path(location)
    with disk_errors("list", path):
        files = [*path.iterdir()] if path.is_dir() else []
    for file in files:
        is_right = {
            **dict.fromkeys(FILES, file.is_file),
            **dict.fromkeys(FOLDERS, file.is_dir),
        }.get(file.name)
        kind = "folder" if file.name in FOLDERS else "file"
        check(
            is_right is None or is_right(),
            f"run_dir={location}: {file.name} must be a {kind}; move it away, or choose another folder",
        )
    for file in (
        file for folder in (path, path / "log") if folder.is_dir() for file in folder.iterdir()
    ):
        is_link = file.is_symlink() and not file.is_dir()
        check(
            not is_link,
            f"run_dir={location} contains a link, {file.name}: a run would write through it; remove it",
        )
        # writing to a pipe could block for ever
        is_usual = file.is_file() or (file.is_dir() and file.suffix != ".txt")
        check(
            is_usual,
            f"run_dir={location}: {file.name} must be a file; move it away, or choose another folder",
        )
        may_write = not WRITTEN.fullmatch(file.name) or os.access(file, os.W_OK)
        check(
            may_write,
            f"run_dir={location}: this user may not write {file.name}; choose a folder of your own",
        )


def find_identity(folder: Folder) -> dict[str, Any] | None:
    """Return the identity of the run in the folder; None if environment.json is missing or not from a run."""
    with suppress(FileNotFoundError, BadContent):
        identity = read_object(folder.read(ENVIRONMENT)).get("identity")
        if isinstance(identity, dict) and identity.keys() >= IDENTITY_KEYS:
            return identity
    return None


def check_is_run_folder(folder: Folder, names: set[str]) -> dict[str, Any]:
    """Return the identity of the run in the folder, which contains `names`; {} without environment.json.

    Raises InputError if the folder is neither a run folder nor empty.
    """
    identity = find_identity(folder) if ENVIRONMENT in names else None
    if identity is not None:
        return identity
    if any(parse(folder.read(name_of(number))) for number in numbers(folder)):
        check(
            ENVIRONMENT not in names,
            f"run_dir={folder.location}: {ENVIRONMENT} is damaged; remove only that file, and the same command resumes "
            "from the checkpoints, which also record the run's identity",
        )
        return {}
    inner = [
        name
        for top in ("lease/", "log/")
        if top.rstrip("/") in names
        for name in folder.names(top)
    ]
    strange = [
        name for name in sorted({*names, *inner} - {"lease", "log"}) if not NEUTRAL.fullmatch(name)
    ]
    check(
        not strange,
        f"run_dir={folder.location} has files that no run writes ({', '.join(strange[:3])}); choose another folder",
    )
    return {}
