"""What a step computes and sends: FLOPs of a sequence, bytes of the gradients, seconds of their all-reduce."""

from __future__ import annotations

from train.config import InstanceConfig, RecordsConfig, TrainConfig
from train.models.model_sizes import Shape, train_flops_per_sequence

WITHOUT_BF16 = ("V100", "T4")
NETWORK_HOP_S = 50e-6  # assumed, of a message between two machines, software included
DEVICE_HOP_S = 10e-6  # assumed, the same between two devices of a machine


def flops_per_sequence(cfg: TrainConfig, shape: Shape, seq_len: int) -> float | None:
    """FLOPs to train on one sequence, as the run's own MFU counts them; None for a model without a formula."""
    labels = len(cfg.data.labels) if isinstance(cfg.data, RecordsConfig) else 0
    head = cfg.task.head_size(seq_len, labels)
    return train_flops_per_sequence(shape, head, seq_len=seq_len, frozen=cfg.model.freeze_layers)


def gradient_bytes(cfg: TrainConfig, shape: Shape) -> int:
    """Bytes that a rank adds up with the others, once a step. Gradients are fp32 whatever the products are computed in,
    but bf16 with that compression, and where the weights themselves are (bf16_stochastic). PowerSGD's are counted in
    full, which is more than it sends.
    """
    trained = shape.trained_parameters(
        cfg.task.head_size(1), freeze_embeddings=cfg.model.freeze_embeddings, freeze_layers=cfg.model.freeze_layers
    )
    is_half = cfg.backend.grad_compression == "bf16" or cfg.backend.precision == "bf16_stochastic"
    return trained * (2 if is_half else 4)


def all_reduce_s(num_bytes: float, instance: InstanceConfig, *, nodes: int, processes_per_node: int) -> float | None:
    """Seconds of an all-reduce by rings, one among the devices of each machine and one among the machines.

    A ring of n takes 2 (n - 1) messages in turn and sends 2 (n - 1) / n of the bytes over each link. Between machines
    all network cards work together. What has no known bandwidth is left out; None if something is sent and nothing is
    known of it.
    """
    parts = []
    if processes_per_node > 1 and instance.device_link_gbyte_per_s is not None:
        parts.append(ring_s(num_bytes, processes_per_node, instance.device_link_gbyte_per_s * 1e9, DEVICE_HOP_S))
    if nodes > 1 and instance.network_gbit_per_s is not None:
        parts.append(ring_s(num_bytes, nodes, instance.network_gbit_per_s * 1e9 / 8, NETWORK_HOP_S))
    return sum(parts) if parts or nodes * processes_per_node == 1 else None


def ring_s(num_bytes: float, members: int, bytes_per_s: float, hop_s: float) -> float:
    """Seconds of an all-reduce by one ring."""
    turns = 2 * (members - 1)
    return turns / members * num_bytes / bytes_per_s + turns * hop_s


def precision_of(cfg: TrainConfig) -> str:
    """The precision that a run would choose: fp32 on CPUs, which is where nothing is known of the machine."""
    if cfg.backend.precision != "auto":
        return cfg.backend.precision
    if cfg.instance.device is None:
        return "fp32"
    return "fp16" if cfg.instance.accelerator in WITHOUT_BF16 else "bf16"
