"""Bytes of device memory that a rank needs, before anything starts, from the model's sizes and the settings. No torch.

States are those of mixed precision as ZeRO counts them (https://arxiv.org/abs/1910.02054, section 3.1), with autocast:
4 bytes a weight, 4 a gradient, 8 for the two moments of AdamW and LAMB, and a copy in 16 bits that products read.

Activations follow Korthikanti et al. (https://arxiv.org/abs/2205.05198, section 4.1): a layer keeps 34 bytes for each
token and hidden unit in 16 bits, of which 2 are masks of dropout and 32 are 16 numbers; 8 of these are the feed-forward
part's for a width of 4 hidden sizes. Autocast keeps 8 bytes more: the two sums that norms read are in fp32, and
queries, keys and values each have a copy of their input in 16 bits. CPUs, whose norms are in bf16, keep fewer. The
scores of attention, 5 bytes a pair of tokens and head there, are not kept: PyTorch's SDPA computes them again.
Temporary memory of the backward pass is not counted, but in the factor of CPUs, which keep scores that have dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from train.config import TrainConfig
from train.config.parallel import Held
from train.models.model_sizes import Shape

GIB = 2**30
STATE_BYTES = 4  # of fp32: weights, gradients, and each of two moments
WEIGHT_BYTES = {"bf16_stochastic": 2, "bf16_master": 6}  # with no fp32 weights, or with bf16 ones in addition
PRODUCT_BYTES = {"fp32": 4, "tf32": 4}  # of a number that products read; 2 in the other precisions
AUTOCAST = ("bf16", "fp16")
MASK_BYTES, AUTOCAST_BYTES, ATTENTION_VALUES = 2, 8, 8  # bytes and numbers of a layer for each token and hidden unit
# These three, for runs on CPUs, reproduce the peaks of seven runs (five are in benchmarks/notes.md) within 7 %.
CPU_PROCESS_BYTES = int(0.85 * GIB)  # of a process with torch and transformers, before there is a model
CPU_ACTIVATIONS = 1.25  # times the kept activations, for temporary memory of the backward pass
CPU_SCORE_BYTES = 14  # per pair of tokens and head, if its scores have dropout
LOGIT_BYTES = 8  # per score of the vocabulary, in addition to the product's: its copy in fp32, and log-softmax


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most."""

    weights: float
    gradients: float
    moments: float
    copies: float  # of weights: gathered from other ranks, or in the type that products read
    activations: float
    saving: float = 0  # on the host, if the device is the host: the copy that a save is written from
    process: float = 0  # the program and its libraries, also of the host

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def state(self) -> float:
        """Memory of a checkpoint's content, which a save copies to the host."""
        return self.weights + self.moments

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GIB:.3g}" for name, value in vars(self).items() if value)
        return f"about {self.total / GIB:.3g} GiB of memory a rank: {parts}"


def memory_of(
    cfg: TrainConfig,
    shape: Shape,
    *,
    world_size: int,
    micro_batch_size: int,
    accumulation: int,
    seq_len: int,
    precision: str,
) -> Memory:
    """Return the memory of a rank that trains on micro batches of this size."""
    model, held, head = cfg.model, cfg.parallel.held(world_size), cfg.task.head_size(seq_len)
    separate = shape.num_hidden_groups if shape.is_albert else shape.num_hidden_layers
    in_layers = separate * shape.layer_parameters()
    every = shape.trained_parameters(head)
    # A stage of a pipeline has its share of the layers, or all of those that are shared; the fullest one has the
    # embedding or the head too.
    depth, own_layers = shape.num_hidden_layers, layers_of_rank(shape, held)
    here = every - in_layers * (depth - own_layers) / depth if separate == depth else every
    unfrozen = shape.trained_parameters(
        head, freeze_embeddings=model.freeze_embeddings, freeze_layers=model.freeze_layers
    )
    trained = unfrozen * here / every
    value = PRODUCT_BYTES.get(precision, 2)
    gathered = {
        "nothing": here if precision in AUTOCAST else 0,
        "layer": here if separate < shape.num_hidden_layers else here - in_layers + 2 * shape.layer_parameters(),
        "model": here,
    }
    # Whole tensors are distributed, the largest of which is the embedding.
    largest = 0 if model.freeze_embeddings or not held.whole_tensors else shape.vocab_size * shape.embedding_width
    moments = max(trained * held.moments, largest)
    sums = trained if held.sums_whole and accumulation > 1 else 0
    return Memory(
        weights=WEIGHT_BYTES.get(precision, STATE_BYTES) * here * held.weights,
        gradients=STATE_BYTES * (trained * held.gradients + sums),
        moments=2 * STATE_BYTES * moments,
        copies=value * gathered[held.gathers],
        activations=activation_bytes(cfg, shape, held, micro_batch_size * seq_len, seq_len, precision),
    )


def on_cpu(needed: Memory, *, scores: float, saves: bool) -> Memory:
    """Return the memory of a rank whose device is the host.

    `scores`: pairs of tokens, of all heads and layers of a micro batch, whose attention has dropout.
    """
    activations = CPU_ACTIVATIONS * needed.activations + CPU_SCORE_BYTES * scores
    saving = needed.state if saves else 0
    return replace(needed, activations=activations, saving=saving, process=CPU_PROCESS_BYTES)


def layers_of_rank(shape: Shape, held: Held) -> int:
    """Return a lower bound of the fullest rank's layers: a large head leaves more of them to the other stages."""
    return math.ceil(shape.num_hidden_layers * held.layers)


def activation_bytes(cfg: TrainConfig, shape: Shape, held: Held, tokens: int, seq_len: int, precision: str) -> float:
    """Return the bytes that one rank's forward pass keeps for the backward pass, of `tokens` in rows of `seq_len`.

    It is the bytes of an evaluation, if these are more.
    """
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    value_bytes = PRODUCT_BYTES.get(precision, 2)
    other_bytes = MASK_BYTES + AUTOCAST_BYTES * (precision in AUTOCAST)
    # The first layers are those that are frozen, so that the fullest stage may have none of them.
    num_layers = min(layers_of_rank(shape, held), shape.num_hidden_layers - cfg.model.freeze_layers) * held.activations
    ffn_values = 2 * (shape.ffn_products - 1)  # into the activation and out of it; both twice if it is gated
    layer = tokens * (hidden * (other_bytes + ATTENTION_VALUES * value_bytes) + ffn_values * ffn * value_bytes)
    if cfg.backend.activation_checkpointing:
        layers = num_layers * tokens * hidden * value_bytes + layer
    else:
        layers = num_layers * layer
    layers += held.buffers * tokens * hidden * STATE_BYTES
    head = cfg.task.head_size(seq_len)
    rows, prediction = tokens / seq_len, shape.vocab_size * (value_bytes + LOGIT_BYTES)
    in_training = layers + rows * held.activations * head.predictions * prediction
    # An evaluation keeps no layers, and a pipeline's is of the whole batch together.
    return max(in_training, (cfg.eval_batch_size or rows) * head.eval_predictions * prediction)


def advice(cfg: TrainConfig, *, world_size: int) -> str:
    """Return the settings that need less memory, the cheapest first."""
    layers = [] if cfg.backend.activation_checkpointing else ["backend.activation_checkpointing=true"]
    split = [cfg.parallel.frees] if world_size > 1 else []
    return ", ".join(["lower micro_batch_size (the global batch stays)", *layers, *split])
