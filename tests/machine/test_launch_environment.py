"""The variables that a launched job's processes start with."""

import pytest

from launch.plan import environment
from train.config import TrainConfig
from train.machine import neuron, rank_setup
from train.machine.launched import Launched
from train.run import compose as cli

GIVEN = ["run_dir=x", "data.path=x", "global_batch_size=32", "max_steps=1"]


def of(name: str, *, nodes: int, processes: int) -> dict[str, str]:
    instance = cli.load_config(TrainConfig, [*GIVEN, f"instance={name}"]).instance
    return environment(instance, nodes=nodes, processes_per_node=processes)


def test_nothing_that_a_run_sets_itself_is_set_to_something_else(tmp_path, monkeypatch):
    """The run leaves what it is given, so a value of the launcher would win."""
    vendor = tmp_path / "class/infiniband/rdmap0/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1d0f\n")
    ours = of("trn1.32xlarge", nodes=2, processes=32)
    launch = Launched(0, 64, 0, 32, master_addr="192.0.2.1")
    monkeypatch.setattr(rank_setup, "SYSFS", tmp_path)
    runs = rank_setup.rank_environment({}, launch, forks=True)
    runs |= neuron.neuron_environment(
        {"MASTER_ADDR": "10.0.0.4"}, nodes=2, stochastic_rounding=False
    )
    assert {name: ours[name] for name in set(ours) & set(runs)} == {
        name: runs[name] for name in set(ours) & set(runs)
    }
    assert not neuron.bad_knobs(ours)


ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
NEURON = {"MALLOC_ARENA_MAX": "64", "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    ("name", "nodes", "processes", "variables"),
    [
        ("local", 1, 2, {}),
        ("local", 2, 2, {}),
        ("trn1.2xlarge", 1, 2, NEURON),
        ("trn1.2xlarge", 1, 99, NEURON | {"OMP_NUM_THREADS": "1"}),
        ("trn1.32xlarge", 16, 32, NEURON | {"FI_PROVIDER": "efa"}),
        ("p4d.24xlarge", 2, 8, ALLOCATOR | {"FI_PROVIDER": "efa", "OMP_NUM_THREADS": "12"}),
        ("g5.xlarge", 2, 1, ALLOCATOR | {"OMP_NUM_THREADS": "4"}),  # no EFA
    ],
)
def test_a_job_gets_what_its_machines_need(
    name: str, nodes: int, processes: int, variables: dict[str, str]
):
    assert of(name, nodes=nodes, processes=processes) == variables
