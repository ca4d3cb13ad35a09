"""How tests plan a launch, and stand in for the machines that it would be for."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from launch import code
from launch.config import LaunchConfig
from launch.node import Node
from launch.plan import make_job, run_overrides
from launch.record import Code, Job, Record
from launch.schedulers import SETTINGS
from train.config import S3Config, TrainConfig
from train.run import compose as cli
from train.storage.folders import sha256_bytes
from train.storage.schema import FileName, Sha256

CODE = Code(FileName(f"code-{'0' * 16}.tar.gz"), Sha256("0" * 64), "0123456789ab")
PYTHON = "/opt/venv/bin/python"
ADDRESS, PORT = "10.0.0.1", 20_707


def plan(own: list[str], of_run: list[str]) -> tuple[LaunchConfig, Job]:
    """What `baretrain launch OWN -- OF_RUN` makes of these settings."""
    cli.add_schema(
        LaunchConfig, "launch", [("cluster", name, kind) for name, kind in SETTINGS.items()]
    )
    cfg = load(LaunchConfig, tuple(own))
    overrides = run_overrides(of_run, own)
    run = load(TrainConfig, tuple(overrides))
    job = make_job(cfg, run, overrides, CODE, folder="/home/me/work")
    return cfg, dataclasses.replace(job, python=PYTHON)


@functools.cache  # many tests give the same settings
def load(schema: type, overrides: tuple[str, ...]) -> Any:
    return cli.load_config(schema, overrides)


def script(path: Path, body: str) -> str:
    """A program that stands in for a job's interpreter, or for a command of Slurm."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def two_nodes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The inside of a job on n1 and n2: commands that know them, and an srun that writes its arguments to the file
    that is returned, each with a zero byte after it.
    """
    folder.mkdir()
    script(folder / "srun", f"printf '%s\\0' \"$@\" > '{folder}/arguments'")
    script(folder / "scontrol", "echo n1 n2")
    script(folder / "sinfo", "echo 10.0.0.1")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return folder / "arguments"


def with_module(job: Job, name: str, source: bytes) -> tuple[Job, Record]:
    """The job with a code bundle that holds nothing but this module, and its record."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        code.add(archive, code.START, code.START_CODE)
        code.add(archive, f"{name}.py", source)
    content = packed.getvalue()
    bundled = dataclasses.replace(
        job, code=Code(FileName("code.tar.gz"), Sha256(sha256_bytes(content)), "")
    )
    record = Record(job.run_dir, S3Config())
    record.write(bundled, config="", bundle=content)
    return bundled, record


def node(
    monkeypatch: pytest.MonkeyPatch,
    record: Record,
    name: str,
    *,
    hosts: str = "n1,n2",
) -> Node:
    """What the machine `name` of a job makes of its record."""
    monkeypatch.setenv("SLURMD_NODENAME", name)
    names = {
        "command": "train",
        "hosts": hosts,
        "address": ADDRESS,
        "port": PORT,
        "attempt": "attempt_0001",
    }
    return Node(record, record.job(), argparse.Namespace(**names))
