"""The source of a model's weights and tokenizer: the Hub, a transformers folder, or a baretrain run, on disk or in S3.

A run's weights are taken from its export/ folder. If there is none, or if the run has continued since, its best
checkpoint is exported to the cache. Files fetched from S3 are also kept in the cache, under a name derived from their
source. On each machine, the first rank that needs the files fetches or exports them, and the other ranks wait.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import InputError, ModelConfig, S3Config, check
from train.data.text.tokenizer import check_same_vocabulary, load_tokenizer
from train.machine.launched import launched
from train.machine.processes import with_this_code
from train.run_folder.exported import is_outdated, saved_steps
from train.storage.atomic_io import made_once
from train.storage.folders import (
    Folder,
    LocalFolder,
    is_s3,
    local_path,
    make_folder,
    open_folder,
    sha256_bytes,
    sha256_json,
)
from train.storage.foreign import check_inside
from train.storage.hub_access import check_model
from train.storage.imported import flags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("train")
NEEDED_TOKENS = ("cls_token", "sep_token", "pad_token")


def resolved(cfg: ModelConfig, s3: S3Config, cache: Path) -> ModelConfig:
    """Return cfg with `pretrained` and `tokenizer` as local folders or Hub ids.

    Raises InputError if a location lacks the files, or if they cannot be fetched or exported.
    """
    given = cfg.pretrained
    check(
        given is None or cfg.initializer_range is None,
        f"model.initializer_range={cfg.initializer_range} is for a new model, but the weights come from {given}; "
        "set it to null",
    )
    weights = None
    if cfg.pretrained is not None:
        weights = located("model.pretrained", cfg.pretrained, s3, cache, needs="config.json")
    tokenizer = weights
    if cfg.tokenizer is not None:
        tokenizer = located("model.tokenizer", cfg.tokenizer, s3, cache, needs="tokenizer.json")
    return replace(cfg, pretrained=weights, tokenizer=tokenizer)


def located(key: str, location: str, s3: S3Config, cache: Path, *, needs: str) -> str:
    """Return a local folder that contains the file `needs`; a Hub id is returned unchanged."""
    check_model(key, location)
    if not is_s3(location) and not local_path(location).is_dir():
        return location
    folder = open_folder(location, s3)
    names = folder.names_here()
    check(bool(names), f"{key}={location}: that folder is empty")
    if needs in names:
        return local_copy(folder, "", cache)
    is_run = "config.yaml" in names and bool(
        names & {"metrics.jsonl", "environment.json", "checkpoints"}
    )
    check(
        is_run,
        f"{key}={location} is neither a run (it has no config.yaml with metrics.jsonl) nor a transformers folder "
        f"(it has no {needs})",
    )
    exported = {name.removeprefix("export/") for name in folder.names("export/")}
    if "config.json" in exported and any(name.endswith(".safetensors") for name in exported):
        if not is_outdated(folder):
            return local_copy(folder, "export/", cache)
        level = logging.WARNING if launched().rank == 0 else logging.DEBUG
        logger.log(
            level,
            "%s has continued since it wrote its export: a checkpoint is used instead",
            location,
        )
    return exported_checkpoint(key, location, folder, s3, cache)


def local_copy(folder: Folder, prefix: str, cache: Path) -> str:
    """Return the path of a subfolder, or of its copy in the cache if the folder is in S3."""
    if isinstance(folder, LocalFolder):
        check_inside(folder.path / prefix, folder.path)
        return str(folder.path / prefix)
    listed = folder.listing(prefix).items()
    tags = {name: head.version for name, head in listed if "/" not in name.removeprefix(prefix)}

    def download(target: Path) -> None:
        for name in tags:
            folder.download(name, target / name.removeprefix(prefix))

    return once(cache, {"of": folder.location, "files": tags}, download)


def exported_checkpoint(key: str, location: str, folder: Folder, s3: S3Config, cache: Path) -> str:
    """Return a folder with an export of the best checkpoint, or of the newest if none was evaluated.

    `baretrain checkpoints RUN export` writes it in a process outside the ranks, so that only one copy of the
    weights is in a machine's memory.
    """
    manifests = list(saved_steps(folder).values())
    check(
        bool(manifests),
        f"{key}={location} is a run that has no export or checkpoint yet; wait for its first, or choose another run",
    )
    made_of = {
        "of": folder.location,
        "steps": {name: sha256_bytes(folder.read(name)) for name in manifests},
    }

    def export(target: Path) -> None:
        options = [*s3.flags(), *(["--cache-dir", str(cache)] if is_s3(location) else [])]
        environ = with_this_code(os.environ)  # In a launched job, this is the code of its bundle.
        command = [
            sys.executable,
            "-m",
            "train",
            "checkpoints",
            location,
            "export",
            str(target),
            *options,
            *flags(),
        ]
        logger.info("%s: exporting its best checkpoint", location)
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise InputError(
                f"{key}={location}: exporting its checkpoint failed ({reason.removeprefix('error: ')}); run "
                f"baretrain checkpoints {location} export FOLDER with --step or --data, and set {key}=FOLDER"
            )

    return once(cache, made_of, export)


def once(cache: Path, made_of: dict[str, Any], make: Callable[[Path], None]) -> str:
    """Return a folder in the cache. The first process of this machine that needs it calls `make` to fill it."""
    return str(made_once(make_folder(cache / "models") / sha256_json(made_of)[:16], make))


def task_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerFast:
    """Return the tokenizer of resolved settings. Raises InputError unless it is usable and fits the weights."""
    source = cfg.tokenizer or cfg.pretrained
    if source is None:
        raise InputError(
            "model.tokenizer is not set, and a new model has no tokenizer: name a Hub id, folder or run"
        )
    tokenizer = load_tokenizer(source, needs=NEEDED_TOKENS)
    if cfg.pretrained is not None and cfg.pretrained != source:
        check_same_vocabulary(
            cfg.pretrained,
            tokenizer.get_vocab(),
            f"model.tokenizer={source} does not have the vocabulary of the weights, {cfg.pretrained}; leave it out",
        )
    return tokenizer
