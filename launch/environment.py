"""The variables that every process of a job starts with.

What `python -m train` sets itself before the ranks join is not among them: network cards, huge pages, open files and
processors (train.host.cluster), and what Neuron's runtime and compiler read (train.host.machine.neuron_environment).
FI_EFA_FORK_SAFE is not either, since it is for kernels before 5.15 only, which train.doctor looks at; nor is
TORCH_NCCL_ASYNC_ERROR_HANDLING, which PyTorch sets by default. What the user has set is for the launcher to keep.
"""

from __future__ import annotations

from train.config import InstanceConfig


def environment(instance: InstanceConfig, *, nodes: int, processes_per_node: int) -> dict[str, str]:
    """Return the variables of a job's processes. A variable of the user overrides them.

    On `instance=local` nothing is known of the machine: a launcher that is on it passes `instance.vcpus`.
    """
    is_neuron = instance.device == "neuron"
    variables = {}
    if nodes > 1:
        # torch.distributed.elastic.rendezvous.dynamic_rendezvous keeps the address of the first round. With c10d the
        # machines change places between rounds: then rank 0 has no server, and the others ask one that is gone. With
        # this variable each round of the rendezvous opens a store of its own.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if nodes > 1 and instance.efa_interfaces:
        # libfabric fails where EFA is missing, instead of taking TCP; machines without EFA: instance.efa_interfaces=0.
        variables["FI_PROVIDER"] = "efa"
        if is_neuron:
            # The Neuron SDK's guide asks for it on several machines. libfabric 1.18 and newer uses it by itself where
            # the card has it, so NCCL needs no variable; older GPU machines (p3dn, g4dn) have cards without.
            variables["FI_EFA_USE_DEVICE_RDMA"] = "1"
    if is_neuron:
        # The memory of glibc's arenas grows with every thread, and 32 ranks share a host (optimum-neuron sets it too).
        variables["MALLOC_ARENA_MAX"] = "64"
    elif instance.device is not None:
        # Batches of several lengths fragment the device's memory.
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if instance.vcpus is not None:
        # torchrun sets one thread for each of several processes; this is each one's share of the processors.
        variables["OMP_NUM_THREADS"] = str(max(1, instance.vcpus // processes_per_node))
    return variables
