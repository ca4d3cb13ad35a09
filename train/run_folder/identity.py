"""The identity of a run: the settings that a resume must keep, and the files that mark a run folder.

A run folder contains environment.json, which describes the run, or at least a lease. A folder without files of these
names may become a run folder. Importing this does not import torch.
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
from train.run_folder.ownership import lease_name, lease_numbers, parse_lease
from train.storage import imported
from train.storage.folders import Folder, canonical_json, disk_errors, local_path
from train.storage.schema import BadContent, read_object

logger = logging.getLogger("train")

ENVIRONMENT = "environment.json"
FILES = (ENVIRONMENT, "config.yaml", "data.json", "metrics.jsonl", "outcome.json", "samples.json")
# files changed in place, not replaced
WRITTEN = re.compile(r"checkpoints|lease|log|metrics\.jsonl|rank_\d{4,}\.txt")
FOLDERS = (
    "checkpoints",
    "export",
    "lease",
    "log",
    "metrics",
    "model",
    "predictions",
    "tensorboard",
)
# Settings of the model and the optimizer that a resume may change. The first only selects an implementation. The second
# only changes the end of a run: `check_continues` in train/parallel/optim.py rejects a change to earlier steps.
FREE = ("model.attention", "optim.decay_fraction")
ORDER = "any lengths"  # of the rows of a step; in earlier versions they had one length
NOTED = "data.lengths"  # how rows are padded; a resume may change it, as on another kind of device
IDENTITY_KEYS = {"data", "seed", "global_batch_size"}


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
    if lengths is not None:
        sections["data.lengths"] = list(lengths)
        sections["data.order"] = ORDER
    return {
        "data": data_id,
        "seed": cfg.seed,
        "global_batch_size": plan.global_batch_size,
        **sections,
        **imported.checksums(),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return "key: old -> new" for each key whose value differs between `before` and `now`."""
    now = json.loads(canonical_json(now))
    keys = sorted({*before, *now} - {NOTED})
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
    check(
        not changed,
        f"{source} belongs to another run ({', '.join(changed)}); choose another run_dir, or set "
        f"resume.force=true to resume with the new settings",
    )


# ---- is it a run folder? --------------------------------------------------------------------------------------------


def check_layout(location: str) -> None:
    """Raise InputError if an entry of the folder is a link to a file, of the wrong kind, or not writable."""
    path = local_path(location)
    with disk_errors("list", path):
        if path.is_dir():
            files = [*path.iterdir()]
        else:
            files = []
    if (path / "log").is_dir():
        files += (path / "log").iterdir()
    for file in files:
        where = f"run_dir={location}: {file.name}"
        is_log = file.parent != path and file.suffix == ".txt"
        if file.name in FOLDERS:
            check(file.is_dir(), f"{where} must be a folder; move it away")
        elif file.name in FILES or is_log:
            # Writing to a pipe could block for ever.
            check(file.is_file(), f"{where} must be a file; move it away")
        if not file.is_dir():
            check(
                not file.is_symlink(),
                f"{where} is a link: a run would write through it; remove it",
            )
        may_write = not WRITTEN.fullmatch(file.name) or os.access(file, os.W_OK)
        check(may_write, f"{where}: this user may not write it; choose a folder of your own")


def find_identity(folder: Folder) -> dict[str, Any] | None:
    """Return the identity of the run in the folder; None if environment.json is missing or not from a run."""
    with suppress(FileNotFoundError, BadContent):
        identity = read_object(folder.read(ENVIRONMENT)).get("identity")
        if isinstance(identity, dict) and identity.keys() >= IDENTITY_KEYS:
            return identity
    return None


def check_is_run_folder(folder: Folder, names: set[str]) -> dict[str, Any]:
    """Return the identity of the run in the folder, which contains `names`; {} without environment.json.

    Raises InputError if the folder is not a run's but has files that a run would replace.
    """
    if ENVIRONMENT in names:
        identity = find_identity(folder)
    else:
        identity = None
    if identity is not None:
        return identity
    leases = [parse_lease(folder.read(lease_name(number))) for number in lease_numbers(folder)]
    if not any(leases):
        # Other ranks may have made the folder of logs before rank 0 has taken the run folder.
        others = sorted(names & {*FILES, *FOLDERS} - {"lease", "log"})
        check(
            not others,
            f"run_dir={folder.location} has files of another program ({', '.join(others[:3])}); choose another folder",
        )
    check(
        ENVIRONMENT not in names,
        f"run_dir={folder.location}: {ENVIRONMENT} is damaged; remove only that file, and the same command resumes "
        "from the checkpoints, which also record the run's identity",
    )
    return {}
