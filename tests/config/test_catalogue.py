"""The catalogue of machine types, conf/instance/*.yaml."""

from functools import cache

import pytest

from train.config import InstanceConfig, TrainConfig
from train.machine.host import instance_names
from train.run import compose as cli
from train.tools.probe import read_instance

GIVEN = ["run_dir=x", "data.path=x", "global_batch_size=32", "max_steps=1"]
MACHINES = [name for name in instance_names() if name != "local"]


@cache
def load(name: str) -> InstanceConfig:
    return cli.load_config(TrainConfig, [*GIVEN, f"instance={name}"]).instance


@pytest.mark.parametrize("name", MACHINES)
def test_the_figures_of_a_machine_are_consistent(name: str):
    machine = load(name)
    assert machine.name == name
    for key in (
        "device",
        "accelerator",
        "devices",
        "device_memory_gib",
        "vcpus",
        "efa_interfaces",
    ):
        assert getattr(machine, key) is not None, key
    assert machine.devices is not None and machine.vcpus is not None
    assert machine.rank_counts is None or max(machine.rank_counts) == machine.devices
    assert machine.device != "neuron" or machine.rank_counts, (
        "Neuron's runtime takes certain numbers of ranks only"
    )
    assert machine.devices <= machine.vcpus  # a processor a rank
    assert (machine.device_tflops_bf16 or 1) > (machine.device_tflops_fp32 or 0)
    assert read_instance(name) == machine


def test_machines_with_the_same_chip_have_the_same_peak():
    peaks: dict[str | None, set[tuple[float | None, ...]]] = {}
    for machine in map(load, MACHINES):
        peaks.setdefault(machine.accelerator, set()).add(
            (machine.device_tflops_bf16, machine.device_tflops_fp32)
        )
    assert {chip: figures for chip, figures in peaks.items() if len(figures) > 1} == {}


def test_ranks_of_trainium_2_are_logical_cores():
    machine = load("trn2.48xlarge")
    assert (machine.devices, machine.rank_counts) == (64, [1, 4, 16, 64])
    assert machine.device_tflops_bf16 is not None
    assert machine.device_tflops_bf16 * 64 == pytest.approx(16 * 667)  # 16 chips
