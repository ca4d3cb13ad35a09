"""From settings to a job: functions that read no file and start nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.code import Bundle
from launch.config import MOST_RANKS, LaunchConfig
from launch.environment import environment
from launch.job import Code, Job
from train.cli.compose import quoted
from train.config import InputError, PrepareConfig, TrainConfig, check, flatten, to_dict
from train.config.backend import check_backend
from train.storage.folders import is_s3, local_path, sha256_json
from train.storage.schema import FileName, Sha256

FIXED = ("task.", "model.", "optim.")  # settings that a run keeps for ever, see train/run_folder/folder.py
RANKS_PER_CPU = 4  # more only wait for one another
FIXED_KEYS = ("seed", "global_batch_size", "data.path", "seq_len")


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    launch: LaunchConfig
    run: TrainConfig | PrepareConfig
    overrides: list[str]  # of the run
    cluster: dict[str, Any]  # settings of the cluster, plain


def run_overrides(given: Sequence[str], launch: Sequence[str]) -> list[str]:
    """The settings of the run: those given for it, and the instance of the launch unless they name another."""
    keys = {override.partition("=")[0] for override in given}
    instance = [each for each in launch if each.partition("=")[0].split(".")[0] == "instance"]
    return [*(each for each in instance if each.partition("=")[0] not in keys), *given]


def located(overrides: Sequence[str], key: str, location: str) -> list[str]:
    """The overrides with the folder `key` written out, so that every node takes the same one."""
    check("${" not in location, f"{key}={location!r} must be without ${{, by which settings refer to others")
    others = [each for each in overrides if each.partition("=")[0] != key]
    return [*others, f"{key}={quoted(location)}"]


def absolute(location: str) -> str:
    """A location that means the same in every working folder."""
    return location.rstrip("/") if is_s3(location) else str(local_path(location).absolute())


def make_job(request: Request, bundle: Bundle, *, python: str, folder: str) -> Job:
    """The job that a request leads to. InputError for a number of ranks that the machines cannot run."""
    cfg, run = request.launch, request.run
    ranks = cfg.ranks_per_node
    if isinstance(run, TrainConfig):
        check_ranks(cfg, uses_devices=run.backend.device != "cpu")
        check_backend(run.backend, cfg.instance)
    else:
        check(
            cfg.nodes == 1, f"nodes={cfg.nodes} are for training: a preparation has parts={cfg.nodes}, a machine each"
        )
    where = absolute(run.run_dir if isinstance(run, TrainConfig) else run.output)
    settings = to_dict(run)
    return Job(
        id=FileName(f"{safe_name(where)}-{sha256_json([where, settings, bundle.sha256])[:8]}"),
        kind="train" if isinstance(run, TrainConfig) else "prepare",
        run_dir=where,
        overrides=located(request.overrides, "run_dir" if isinstance(run, TrainConfig) else "output", where),
        config_sha256=Sha256(sha256_json(settings)),
        python=python,
        folder=folder,
        code=Code(FileName(bundle.file), Sha256(bundle.sha256), bundle.revision),
        scheduler=cfg.cluster.kind,
        cluster=request.cluster,
        instance=cfg.instance.name,
        nodes=cfg.nodes,
        spares=cfg.spares,
        processes_per_node=ranks,
        environment=environment(cfg.instance, nodes=cfg.nodes, processes_per_node=ranks),
        s3=asdict(run.s3),
        parts=cfg.parts or 1,
        parts_at_once=cfg.parts_at_once,
    )


def check_ranks(cfg: LaunchConfig, *, uses_devices: bool) -> None:
    """InputError for a number of ranks that an instance cannot run: see train.host.launched.check_launch."""
    counts = cfg.instance.rank_counts
    if counts is None:
        most, has = most_ranks(cfg, uses_devices=uses_devices)
        check(
            cfg.ranks_per_node <= most,
            f"processes_per_node={cfg.ranks_per_node}: {cfg.instance.name} has {has}, {most} ranks are the most",
        )
        return
    valid = counts if cfg.nodes == 1 else [max(counts)]
    name = cfg.instance.name if cfg.nodes == 1 else f"each of several {cfg.instance.name}"
    check(
        cfg.ranks_per_node in valid,
        f"processes_per_node={cfg.ranks_per_node}: {name} runs {' or '.join(map(str, valid))}",
    )


def most_ranks(cfg: LaunchConfig, *, uses_devices: bool) -> tuple[int, str]:
    """The most ranks of a machine, and what it has: one a device; without devices a few a CPU, to try things out."""
    devices, cpus = cfg.instance.devices, cfg.instance.vcpus
    if uses_devices and cfg.instance.device is not None and devices is not None:
        return devices, f"{devices} device{'s' * (devices > 1)}"
    if cpus is None and cfg.cluster.is_here:
        cpus = os.cpu_count()
    return (MOST_RANKS, "CPUs") if cpus is None else (RANKS_PER_CPU * cpus, f"{cpus} CPU{'s' * (cpus > 1)}")


def safe_name(location: str) -> str:
    """The last part of a location, as a name that no scheduler or shell reads in another way."""
    last = location.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-")[:40] or "run"


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], *, run_dir: str) -> None:
    """InputError if settings differ that a run keeps: what it learns, from which data, in which batches."""
    old, new = dict(flatten(before)), dict(flatten(now))
    keys = sorted(key for key in {*old, *new} if key.startswith(FIXED) or key in FIXED_KEYS)
    changed = [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]
    if changed:
        raise InputError(
            f"the settings of {run_dir} changed since it began ({', '.join(changed)}); launch it with the same, choose "
            f"another folder, or resume what was launched: python -m launch resume {run_dir}"
        )
