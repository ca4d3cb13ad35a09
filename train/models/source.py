"""Where weights and tokenizer come from: the Hub, a folder of `transformers`, or a run of ours, on disk or in S3.

A run gives its export/, or else its best checkpoint, as when it has gone on since; that is exported to the cache. What
is fetched or exported is kept there under a name made from what it was made of, and done once per machine: the ranks
wait for the first of them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerFast

import train
from train.config import InputError, ModelConfig, S3Config, check
from train.exported import is_outdated, saved_steps
from train.hub_access import asking_hub, hub_or_path, is_at_hub
from train.launched import launched
from train.models.pretrained import is_folder, quiet, reason_of
from train.storage import Folder, LocalFolder, is_s3, local_path, make_folder, open_folder, sha256_json

if TYPE_CHECKING:
    from train.s3 import S3Folder

logger = logging.getLogger("train")
WEIGHTS = (".safetensors", ".bin")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # by which a process knows that it is one of several


# ---- places --------------------------------------------------------------------------------------------------------


def resolved(cfg: ModelConfig, s3: S3Config, cache: Path) -> ModelConfig:
    """The same with weights and tokenizer that transformers finds: a local folder or a Hub id under `pretrained` and
    `tokenizer`, and no `init_from`. InputError names a place that has none.
    """
    weights = None if cfg.pretrained is None else hub_or_path(cfg.pretrained)
    if cfg.init_from is not None:
        weights = located("model.init_from", cfg.init_from, s3, cache, needs="config.json")
    tokenizer = weights
    if cfg.tokenizer is not None:
        tokenizer = located("model.tokenizer", cfg.tokenizer, s3, cache, needs="tokenizer.json")
    return replace(cfg, pretrained=weights, init_from=None, tokenizer=tokenizer)


def located(key: str, place: str, s3: S3Config, cache: Path, *, needs: str) -> str:
    """A local folder with the file `needs`; a Hub id stays as it is."""
    if not is_s3(place) and not local_path(place).is_dir():
        check(is_at_hub(place), f"{key}={place}: there is no such folder")
        return place
    folder = open_folder(place, s3)
    names = folder.names_here()
    check(bool(names), f"{key}={place}: there is nothing in that folder")
    if needs in names:
        return at_hand(folder, "", cache)
    is_run = "config.yaml" in names and bool(names & {"metrics.jsonl", "environment.json", "checkpoints"})
    check(
        is_run,
        f"{key}={place} is neither a run (it has no config.yaml with metrics.jsonl) nor a folder of transformers (it "
        f"has no {needs})",
    )
    exported = {name.removeprefix("export/") for name in folder.names("export/")}
    if "config.json" in exported and any(name.endswith(WEIGHTS) for name in exported):
        if not is_outdated(folder):
            return at_hand(folder, "export/", cache)
        level = logging.WARNING if launched().rank == 0 else logging.DEBUG
        logger.log(level, "%s has gone on since it wrote its export: a checkpoint is taken instead", place)
    return exported_checkpoint(key, place, folder, s3, cache)


def at_hand(folder: Folder, prefix: str, cache: Path) -> str:
    """A subfolder itself, or its copy if it is in S3."""
    if isinstance(folder, LocalFolder):
        return str(folder.path / prefix)
    remote = cast("S3Folder", folder)
    names = [name for name in folder.names(prefix) if "/" not in name.removeprefix(prefix)]
    tags = {name: (remote.head(name) or {}).get("ETag") for name in names}

    def download(target: Path) -> None:
        for name in names:
            remote.download(name, target / name.removeprefix(prefix))

    return once(cache, {"of": folder.location, "files": tags}, download)


def exported_checkpoint(key: str, place: str, folder: Folder, s3: S3Config, cache: Path) -> str:
    """What `python -m train.checkpoints RUN export` writes of the best step, or of the newest if none was evaluated.

    A process of its own does it: it is no rank, and the weights are in memory once per machine.
    """
    manifests = list(saved_steps(folder).values())
    check(
        bool(manifests),
        f"{key}={place} is a run with neither an export nor a checkpoint yet; wait for its first, or choose another",
    )
    made_of = {"of": folder.location, "steps": {name: folder.read(name).decode() for name in manifests}}

    def export(target: Path) -> None:
        options = [*s3.flags(), *(["--cache-dir", str(cache)] if is_s3(place) else [])]  # for what comes and goes
        environ = {name: value for name, value in os.environ.items() if name not in RANKS}
        root = str(Path(train.__file__).parent.parent)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "train.checkpoints", place, "export", str(target), *options]
        logger.info("%s: exporting its best checkpoint", place)
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise InputError(
                f"{key}={place}: its checkpoint cannot be exported ({reason.removeprefix('error: ')}); export one by "
                f"python -m train.checkpoints {place} export FOLDER, with --step or --data, and give that folder"
            )

    return once(cache, made_of, export)


def once(cache: Path, made_of: dict[str, Any], make: Callable[[Path], None]) -> str:
    """A folder of the cache that `make` has filled, by the first process of this machine that asked for it."""
    place = make_folder(cache / "models")
    target = place / sha256_json(made_of)[:16]
    with (place / f"{target.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            scratch = place / f".{target.name}.tmp-{uuid.uuid4().hex}"
            scratch.mkdir()
            try:
                make(scratch)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)  # of what failed; else it has gone
    return str(target)


# ---- tokenizer -----------------------------------------------------------------------------------------------------


def task_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of a configuration that is resolved. It neither cuts nor pads. InputError for one that is not to be
    had, is slow, lacks a special token, or has another vocabulary than the weights' own.
    """
    source = cfg.tokenizer or cfg.pretrained
    if source is None:
        raise InputError(
            "model.tokenizer is not set, and a model made from sizes has none: name a Hub id, folder or run"
        )
    tokenizer = read_tokenizer(source)
    if isinstance(tokenizer, str):
        raise InputError(f"tokenizer {source} cannot be loaded: {tokenizer}; without the Hub give a folder")
    check(
        tokenizer.is_fast,
        f"tokenizer {source} is a slow one ({type(tokenizer).__name__}, pure Python): it would be slower than the "
        "training, and does not know which characters a token is of; choose a model with a fast one (tokenizer.json)",
    )
    for name in ("cls_token", "sep_token", "pad_token"):
        check(getattr(tokenizer, name) is not None, f"tokenizer {source} has no {name}; the model needs one")
    if cfg.pretrained not in (None, source):
        theirs = read_tokenizer(cfg.pretrained)
        check(
            isinstance(theirs, str) or theirs.get_vocab() == tokenizer.get_vocab(),
            f"model.tokenizer={source} has another vocabulary than that of the weights, {cfg.pretrained}; leave it out",
        )
    tokenizer.backend_tokenizer.no_truncation()  # some are saved with it, and would cut in silence
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def read_tokenizer(source: str) -> Any:
    """transformers' tokenizer, or why there is none."""
    try:
        with quiet(), asking_hub(source):
            tokenizer = AutoTokenizer.from_pretrained(
                source, local_files_only=is_folder(source), trust_remote_code=False
            )
    except Exception as error:  # of tokenizers, plain ones, for a file that is not a tokenizer's
        return reason_of(source, error)
    # Where there is no file transformers makes one of the special tokens alone.
    is_empty = tokenizer.is_fast and len(tokenizer) <= len(tokenizer.all_special_ids)
    return "it has no tokenizer.json or vocabulary file" if is_empty else tokenizer
