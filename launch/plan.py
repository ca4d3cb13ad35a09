"""Functions that make a job from the settings of a launch and a run. They read no file and start nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from launch.config import LaunchConfig
from launch.record import Code, Job
from train.config import (
    InputError,
    InstanceConfig,
    ShardsConfig,
    TrainConfig,
    check,
    flatten,
    to_dict,
)
from train.config.backend import check_backend
from train.config.data import is_named
from train.run.names import quoted
from train.storage.folders import is_s3, local_path, sha256_json
from train.storage.hub_access import is_at_hub
from train.storage.schema import FileName, Sha256

# the start of a path, in settings that may be any text
PATH = re.compile(r"(/|~|\.\.?/|file:)[^\n]")
# Settings that name a place in S3, at the Hub or in a folder.
PLACES = ("data.path", "model.pretrained", "model.tokenizer")
# Settings of PyTorch's allocator. PyTorch 2.9 reads only the second name on GPUs, and warns of it unless the first one
# is set too. Newer versions read the first.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
OF_MACHINE = ("run_dir", "data.cache_dir")  # folders that each machine makes


def run_overrides(given: Sequence[str], launch: Sequence[str]) -> list[str]:
    """Return the run's overrides: the launch's instance settings, except those in `given`, and then `given`."""
    keys = {override.partition("=")[0] for override in given}
    overrides = []
    for override in launch:
        key = override.partition("=")[0]
        is_instance = key.split(".")[0] == "instance"
        if is_instance and key not in keys:
            overrides.append(override)
    return [*overrides, *given]


def located(overrides: Sequence[str], key: str, location: str) -> list[str]:
    """Return the overrides with `key` set to an absolute location, so that every node uses the same folder."""
    others = [each for each in overrides if not each.startswith(f"{key}=")]
    return [*others, f"{key}={quoted(location)}"]


def absolute(location: str) -> str:
    """Return a location as an absolute path or S3 URL, which is valid in every working directory."""
    if is_s3(location):
        return location.rstrip("/")
    return str(local_path(location).absolute())


def make_job(
    cfg: LaunchConfig,
    run: TrainConfig,
    overrides: Sequence[str],
    code: Code,
    *,
    folder: str,
) -> Job:
    """Return the job for `run`, made from `overrides`. Raises InputError if the machines cannot run that many ranks."""
    check_ranks(cfg, uses_devices=run.backend.device != "cpu")
    check_backend(run.backend, cfg.instance)
    if not cfg.cluster.shares_disks:
        check_reachable(run)
    where = absolute(run.run_dir)
    ranks = cfg.ranks_per_node
    settings = to_dict(run)
    return Job(
        id=FileName(f"{safe_name(where)}-{sha256_json([where, settings, code.sha256])[:8]}"),
        run_dir=where,
        overrides=located(overrides, "run_dir", where),
        config_sha256=Sha256(sha256_json(settings)),
        python=cfg.cluster.interpreter(),
        folder=folder,
        code=code,
        scheduler=cfg.cluster.kind,
        cluster=asdict(cfg.cluster),
        instance=cfg.instance.name,
        nodes=cfg.nodes,
        processes_per_node=ranks,
        environment=environment(cfg.instance, nodes=cfg.nodes, processes_per_node=ranks),
        s3=asdict(run.s3),
    )


def check_reachable(run: TrainConfig) -> None:
    """Raise InputError if a setting names a file or folder of this computer, which the machines do not see."""
    has_shards = isinstance(run.data, ShardsConfig)
    local = []
    for key, value in flatten(to_dict(run)):
        if key in OF_MACHINE:
            continue
        for each in value if isinstance(value, list) else [value]:
            is_shards = key == "data.path" and has_shards
            if isinstance(each, str) and (is_here(key, each) or (is_shards and not is_s3(each))):
                local.append(f"{key}={each}")
    check(
        not local,
        f"{' '.join(local)}: the machines do not see this computer's folders; copy them to S3",
    )


def is_here(key: str, value: str) -> bool:
    """Return whether a setting's value is a path on this computer: it looks like one in PLACES, or it exists."""
    if key in PLACES:
        return not is_s3(value) and (is_named(value) or not is_at_hub(value))
    with suppress(InputError, OSError):
        return PATH.match(value) is not None and local_path(value).exists()
    return False


def check_ranks(cfg: LaunchConfig, *, uses_devices: bool) -> None:
    """Raise InputError if a machine has fewer devices than ranks."""
    instance = cfg.instance
    ranks = cfg.ranks_per_node
    if uses_devices and instance.device is not None and instance.devices is not None:
        check(
            ranks <= instance.devices,
            f"processes_per_node={ranks}: {instance.name} runs at most {instance.devices} ranks, one per device",
        )


def environment(
    instance: InstanceConfig, *, nodes: int, processes_per_node: int
) -> dict[str, str]:
    """Return the environment variables of every process of a job. Variables that the user sets take precedence.

    `baretrain train` sets the variables for network cards, huge pages and open files
    (train.machine.rank_setup), and for Neuron's runtime and compiler (train.machine.neuron), before the ranks join.
    FI_EFA_FORK_SAFE is not set, since only kernels before 5.15 need it (baretrain doctor warns of these), nor are
    variables for which PyTorch's default is right, such as TORCH_NCCL_ASYNC_ERROR_HANDLING.
    """
    variables = {}
    if nodes > 1 and instance.efa_interfaces:
        # With this, libfabric fails if EFA is missing, instead of using TCP. instance.efa_interfaces=0 leaves it out.
        variables["FI_PROVIDER"] = "efa"
    if instance.device == "neuron":
        # glibc makes arenas for threads, and 32 ranks share the host's memory. optimum-neuron sets this variable, too.
        variables["MALLOC_ARENA_MAX"] = "64"
    elif instance.device is not None:
        # Batches of different lengths fragment the device's memory.
        for name in ALLOCATOR:
            variables[name] = "expandable_segments:True"
    if instance.vcpus is not None:
        # torchrun limits each of several processes to one thread. Give each process its share of the CPUs instead.
        variables["OMP_NUM_THREADS"] = str(max(1, instance.vcpus // processes_per_node))
    return variables


def safe_name(location: str) -> str:
    """Return the last part of a location, reduced to characters that every scheduler and shell reads literally."""
    last = location.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-")[:40] or "run"
