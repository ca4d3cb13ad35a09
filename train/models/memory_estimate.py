"""An estimate of a rank's device memory in bytes, from the model's sizes and the settings. It does not import torch.

Model states are counted as in ZeRO (https://arxiv.org/abs/1910.02054, section 3.1), for autocast. A parameter takes 4
bytes for its weight, 4 for its gradient, 8 for the two moments of AdamW and LAMB, and 2 for a copy in 16 bits.

Activations follow Korthikanti et al. (https://arxiv.org/abs/2205.05198, section 4.1). In 16 bits, a layer keeps 34
bytes for each token and hidden unit: 2 for dropout masks and 32 for 16 values. If the intermediate size is 4 times the
hidden size, 8 of the values belong to the feed-forward layers. Autocast keeps 8 more bytes: the inputs of the two norms
are fp32, and queries, keys and values each have a 16-bit copy of their input. CPUs keep less: their norms are bf16.

The paper also counts attention scores, 5 bytes for each head and pair of tokens. PyTorch's SDPA recomputes them
instead of keeping them, except scores with dropout on CPUs, which are not counted. Neither are temporary memory of the
backward pass and, on CPUs, the program and its libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from train.config import TrainConfig
from train.config.parallel import Held
from train.models.model_sizes import Shape

GIB = 2**30
STATE_BYTES = 4  # bytes of an fp32 weight, gradient or moment
# a bf16 weight alone, or with its fp32 master copy
WEIGHT_BYTES = {"bf16_stochastic": 2, "bf16_master": 6}
# bytes of an operand of a matrix product; 2 in other precisions
PRODUCT_BYTES = {"fp32": 4, "tf32": 4}
AUTOCAST = ("bf16", "fp16")
MASK_BYTES, AUTOCAST_BYTES, ATTENTION_VALUES = 2, 8, 8  # per layer, token and hidden unit
# bytes per logit in addition to the logit itself: an fp32 copy, and the log-softmax
LOGIT_BYTES = 8


@dataclass(frozen=True)
class Memory:
    """The memory of the rank that needs most, in bytes."""

    weights: float
    gradients: float
    moments: float
    # copies of weights: gathered from other ranks, or in the dtype of matrix products
    copies: float
    activations: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def state(self) -> float:
        """Bytes of a checkpoint's tensors, which a save copies to the host."""
        return self.weights + self.moments

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {value / GIB:.3g}" for name, value in vars(self).items() if value
        )
        return f"about {self.total / GIB:.3g} GiB of memory per rank: {parts}"


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
    """Return the memory of the rank that needs most. Micro batches have `micro_batch_size` rows of `seq_len` tokens."""
    model, held = cfg.model, cfg.parallel.held(world_size)
    head = cfg.task.head_size(seq_len)
    every = shape.trained_parameters(head)
    unfrozen = shape.trained_parameters(head, freeze_layers=model.freeze_layers)
    here = every - parameters_elsewhere(shape, held)
    trained = unfrozen * here / every
    gradients = trained * held.gradients
    if held.gathers != "nothing" and accumulation > 1:
        gradients += trained
    copied = copied_parameters(shape, held, here, precision)
    tokens = micro_batch_size * seq_len
    return Memory(
        weights=WEIGHT_BYTES.get(precision, STATE_BYTES) * here * held.weights,
        gradients=STATE_BYTES * gradients,
        moments=2 * STATE_BYTES * trained * held.moments,
        copies=PRODUCT_BYTES.get(precision, 2) * copied,
        activations=activation_bytes(cfg, shape, held, tokens, seq_len, precision),
    )


def parameters_elsewhere(shape: Shape, held: Held) -> float:
    """Return the number of parameters that only other pipeline stages hold; 0 if layers share their weights.

    The stage that needs most memory holds its share of the layers, and the embedding or the head.
    """
    depth = shape.num_hidden_layers
    if shape.num_layer_weights < depth:
        return 0
    return depth * shape.layer_parameters() * (depth - layers_of_rank(shape, held)) / depth


def copied_parameters(shape: Shape, held: Held, here: float, precision: str) -> float:
    """Return how many of a rank's `here` parameters are in its memory once more."""
    if held.gathers == "nothing" and precision not in AUTOCAST:
        return 0
    has_layers_alone = shape.num_layer_weights == shape.num_hidden_layers
    if held.gathers == "layer" and has_layers_alone:
        return here - (shape.num_layer_weights - 2) * shape.layer_parameters()
    return here


def layers_of_rank(shape: Shape, held: Held) -> int:
    """Return the largest layer count of a rank, or fewer: layers that a large head moves elsewhere do not count."""
    return math.ceil(shape.num_hidden_layers * held.layers)


def activation_bytes(
    cfg: TrainConfig, shape: Shape, held: Held, tokens: int, seq_len: int, precision: str
) -> float:
    """Return the bytes that a forward pass keeps for the backward pass, or those of an evaluation if that needs more.

    A micro batch has `tokens` tokens, in rows of `seq_len`.
    """
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    value_bytes = PRODUCT_BYTES.get(precision, 2)
    other_bytes = MASK_BYTES + AUTOCAST_BYTES * (precision in AUTOCAST)
    # Frozen layers come first, so the stage that needs most memory may hold none of them.
    unfrozen = shape.num_hidden_layers - cfg.model.freeze_layers
    num_layers = min(layers_of_rank(shape, held), unfrozen) * held.activations
    # The activation's input and output, both doubled if it is gated.
    ffn_values = 2 * (shape.ffn_products - 1)
    layer = tokens * (
        hidden * (other_bytes + ATTENTION_VALUES * value_bytes) + ffn_values * ffn * value_bytes
    )
    if cfg.backend.activation_checkpointing:
        layers = num_layers * tokens * hidden * value_bytes + layer
    else:
        layers = num_layers * layer
    layers += held.buffers * tokens * hidden * STATE_BYTES
    head = cfg.task.head_size(seq_len)
    rows, prediction = tokens / seq_len, shape.vocab_size * (value_bytes + LOGIT_BYTES)
    in_training = layers + rows * held.activations * head.predictions * prediction
    # An evaluation keeps no layers' activations, and a pipeline evaluates a whole batch in one pass.
    return max(in_training, (cfg.eval_batch_size or rows) * head.eval_predictions * prediction)


def advice(cfg: TrainConfig, *, world_size: int) -> str:
    """Return the settings that would save memory, the cheapest first."""
    found = ["lower micro_batch_size (the global batch stays the same)"]
    if not cfg.backend.activation_checkpointing:
        found.append("backend.activation_checkpointing=true")
    if world_size > 1:
        found.append(cfg.parallel.frees)
    return ", ".join(found)
