"""Fixtures: a real Slurm cluster for each process of a test run, and its commands for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from machines_fixture import skip_without
from services import slurm_cluster as services
from services.slurm_cluster import SlurmCluster, slurm_cluster


@pytest.fixture(scope="session")
def shared_slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    skip_without(request, "Slurm", services)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=3) as cluster:
        yield cluster


@pytest.fixture
def slurm(
    shared_slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> SlurmCluster:
    """The cluster without jobs and with all nodes idle, in an environment and a folder from which to submit to it."""
    shared_slurm.restore()
    for name, value in shared_slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # where jobs print what they print
    return shared_slurm
