"""The variables that every process of a job starts with, each with its reason.

What `python -m train` sets itself before the ranks join is not among them: network cards, huge pages, open files and
processors (train.host.cluster), and what Neuron's runtime and compiler read (train.host.machine.neuron_environment).
FI_EFA_FORK_SAFE is not either, since it is for kernels before 5.15 only, which train.doctor looks at; nor is
TORCH_NCCL_ASYNC_ERROR_HANDLING, which PyTorch sets by default. What the user has set is for the launcher to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from train.config import InstanceConfig, check


@dataclass(frozen=True)
class Layout:
    """What a variable may depend on."""

    instance: InstanceConfig
    nodes: int
    processes_per_node: int

    @property
    def has_several_nodes(self) -> bool:
        return self.nodes > 1

    @property
    def uses_efa(self) -> bool:
        return self.has_several_nodes and bool(self.instance.efa_interfaces)

    @property
    def is_neuron(self) -> bool:
        return self.instance.device == "neuron"

    @property
    def is_cuda(self) -> bool:
        return not self.is_neuron and self.instance.device is not None

    @property
    def threads(self) -> int | None:
        """Threads of a process; None if the machine's processors are unknown."""
        vcpus = self.instance.vcpus
        return None if vcpus is None else max(1, vcpus // self.processes_per_node)


@dataclass(frozen=True)
class Variable:
    name: str
    value: Callable[[Layout], str | None]  # None: the job does without
    why: str


def always(value: str, *, given: Callable[[Layout], bool]) -> Callable[[Layout], str | None]:
    """A value that does not depend on the job, for the jobs that need it."""
    return lambda layout: value if given(layout) else None


VARIABLES = (
    Variable(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        always("1", given=lambda at: at.has_several_nodes),
        # torch.distributed.elastic.rendezvous.dynamic_rendezvous keeps the address of the first round. With c10d the
        # machines change places between rounds: then rank 0 has no server, and the others ask one that is gone.
        "each round of the rendezvous opens a store of its own, so ranks that start again find one another",
    ),
    Variable(
        "FI_PROVIDER",
        always("efa", given=lambda at: at.uses_efa),
        "libfabric fails where EFA is missing, instead of taking TCP; machines without EFA: instance.efa_interfaces=0",
    ),
    Variable(
        "FI_EFA_USE_DEVICE_RDMA",
        # libfabric 1.18 and newer uses it by itself where the card has it, so NCCL needs no variable; older GPU
        # machines (p3dn, g4dn) have cards without, on which it must not be asked for.
        always("1", given=lambda at: at.uses_efa and at.is_neuron),
        "the Neuron SDK's guide asks for it on several machines",
    ),
    Variable(
        "MALLOC_ARENA_MAX",
        always("64", given=lambda at: at.is_neuron),
        "the memory of glibc's arenas grows with every thread, and 32 ranks share a host (optimum-neuron sets it too)",
    ),
    Variable(
        "PYTORCH_CUDA_ALLOC_CONF",
        always("expandable_segments:True", given=lambda at: at.is_cuda),
        "batches of several lengths fragment the device's memory",
    ),
    Variable(
        "OMP_NUM_THREADS",
        lambda at: None if at.threads is None else str(at.threads),
        "torchrun gives each of several processes one thread; this is each one's share of the processors",
    ),
)


def environment(instance: InstanceConfig, *, nodes: int, processes_per_node: int) -> dict[str, str]:
    """The variables of a job's processes, which a variable of the user goes before.

    On `instance=local` nothing is known of the machine: a launcher that is on it gives `instance.vcpus`.
    """
    check(nodes > 0, f"nodes={nodes} must be above 0")
    check(processes_per_node > 0, f"processes per node: {processes_per_node} must be above 0")
    layout = Layout(instance, nodes, processes_per_node)
    values = {variable.name: variable.value(layout) for variable in VARIABLES}
    return {name: value for name, value in values.items() if value is not None}
