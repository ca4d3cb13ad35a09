"""The variables that a launched job's processes start with."""

import pytest

from launch.plan import environment
from train.config import TrainConfig
from train.run import compose as cli

GIVEN = ["run_dir=x", "data.path=x", "global_batch_size=32", "max_steps=1"]


def of(name: str, *, nodes: int, processes: int) -> dict[str, str]:
    instance = cli.load_config(TrainConfig, [*GIVEN, f"instance={name}"]).instance
    return environment(instance, nodes=nodes, processes_per_node=processes)


ALLOCATOR = dict.fromkeys(
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
)
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
