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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as their_logging

import train
from train.config import InputError, ModelConfig, S3Config, check, launched_rank
from train.exported import is_outdated, saved_steps
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
    weights = cfg.pretrained
    if cfg.init_from is not None:
        weights = located("model.init_from", cfg.init_from, s3, cache, needs="config.json")
    tokenizer = weights
    if cfg.tokenizer is not None:
        tokenizer = located("model.tokenizer", cfg.tokenizer, s3, cache, needs="tokenizer.json")
    return replace(cfg, pretrained=weights, init_from=None, tokenizer=tokenizer)


def located(key: str, place: str, s3: S3Config, cache: Path, *, needs: str) -> str:
    """A local folder with the file `needs`; a Hub id stays as it is."""
    if not is_s3(place) and not local_path(place).is_dir():
        is_path = place.startswith(("/", ".", "~", "file://")) or place.count("/") > 1
        check(not is_path, f"{key}={place}: there is no such folder")
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
        level = logging.WARNING if launched_rank() == 0 else logging.DEBUG
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


# ---- weights -------------------------------------------------------------------------------------------------------


def read_weights(
    auto: Any, source: str, config: PreTrainedConfig, *, attention: str, new_head: bool
) -> tuple[PreTrainedModel, frozenset[str]]:
    """A model of a class of transformers' (AutoModelFor...) in float32, and the names of the parameters that the
    checkpoint does not have, or of all outside the encoder if `new_head`: these begin with random values.

    Raises InputError unless the checkpoint holds the whole encoder (it may lack the pooler), and a head that fits if it
    has one.
    """
    try:
        with quiet():
            network, found = auto.from_pretrained(
                source,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below
                local_files_only=is_folder(source),
            )
    except (OSError, SafetensorError) as error:
        raise InputError(unavailable(source, error)) from error
    missing, inside = set(found["missing_keys"]), set(network.base_model.parameters())
    encoder = {name for name, p in network.named_parameters() if p in inside and ".pooler." not in name}
    check(not encoder <= missing, f"{source} holds no weights of a {config.model_type} encoder, which it says it is")
    lacking = sorted(encoder & missing)
    check(not lacking, f"{source} lacks {len(lacking)} weights of the encoder: {', '.join(lacking[:3])}")
    other = {name: f"{list(theirs)} instead of {list(ours)}" for name, theirs, ours in found["mismatched_keys"]}
    wrong = [name for name in sorted(other) if name in encoder or not new_head]
    hint = (
        "its config.json is of another model" if encoder & set(wrong) else "model.new_head=true begins with a new one"
    )
    check(not wrong, f"{source}: {', '.join(f'{name} is {other[name]}' for name in wrong[:3])}; {hint}")
    if new_head:
        missing |= begin_head(network)
    if missing:
        logger.info("%s: read; new, with random weights: %s", source, ", ".join(parts(missing)))
    return network, frozenset(missing)


def begin_head(network: PreTrainedModel) -> set[str]:
    """Draw all weights outside the encoder anew, as transformers does for a new model; gives their names."""
    encoder = set(network.base_model.modules())
    begun = set()
    for place, module in network.named_modules():
        if module is network or module in encoder:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            parameter._is_hf_initialized = False  # transformers' mark, for what it leaves alone
            begun.add(f"{place}.{name}")
        network._init_weights(module)
    return begun


def parts(names: set[str]) -> list[str]:
    """The modules whose parameters these are."""
    return sorted({name.rpartition(".")[0] for name in names})


def without_weights(kind: str, folder: Path) -> PreTrainedModel:
    """A model for "classify" or "qa", of the config.json in a folder, in float32 with random weights."""
    auto = AutoModelForSequenceClassification if kind == "classify" else AutoModelForQuestionAnswering
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    network: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    return network


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' tables and progress bars: what matters of them is said by us, in a line."""
    level, had_bars = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if had_bars:
            their_logging.enable_progress_bar()


def is_folder(source: str) -> bool:
    """Whether nothing is to be asked of the Hub."""
    return Path(source).is_dir()


def unavailable(source: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    return f"model.pretrained={source} is not to be had ({reason}); is it a folder or a Hub id, and the machine online?"


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
        raise InputError(
            f"tokenizer {source} is not to be had: {tokenizer}; without the Hub give a folder, model.pretrained=FOLDER "
            "(and HF_HUB_OFFLINE=1, so that nothing waits for it)"
        )
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
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=is_folder(source))
    except (OSError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    # Where there is no file transformers makes one of the special tokens alone.
    is_empty = tokenizer.is_fast and len(tokenizer) <= len(tokenizer.all_special_ids)
    return "it has no tokenizer.json or vocabulary file" if is_empty else tokenizer
