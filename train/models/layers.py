"""The repeated layers of `transformers` encoders, and what a backend does to them without knowing the architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.albert.modeling_albert import AlbertLayerGroup, AlbertTransformer

from train.config import check

Checkpoint = Callable[..., Any]  # checkpoint(function, *tensors): function(*tensors), computed again in backward
Run = Callable[[Tensor, Tensor | None], Tensor]  # (hidden [B, S, H], float mask or None) -> hidden


def repeated_layers(network: PreTrainedModel) -> list[nn.Module]:
    """The layers that a network is made of, in their order; a shared one comes once."""
    return [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer | AlbertLayerGroup)]


def separate_layers(network: PreTrainedModel) -> list[nn.Module]:
    """The layers that have weights of their own; none if one is shared over the whole depth. InputError if no layer is
    known.
    """
    layers = repeated_layers(network)
    check(
        bool(layers),
        f"the layers of {type(network).__name__} are not known, so that they cannot be split over ranks; choose "
        "parallel=data",
    )
    return layers if len(layers) >= network.config.num_hidden_layers else []


def recompute_layers(network: PreTrainedModel, checkpoint: Checkpoint) -> int:
    """Keep only the input of each layer for the backward pass. Returns the number of such layers.

    The switch of transformers ignores ALBERT, and its default recomputation is not the one that XLA needs.
    """
    layers = repeated_layers(network)
    for layer in layers:
        layer.forward = recomputed(layer.forward, checkpoint, layer)
    return len(layers)


def recomputed(forward: Callable[..., Any], checkpoint: Checkpoint, layer: nn.Module) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not layer.training or not hidden.requires_grad:
            return forward(hidden, *args, **kwargs)
        return checkpoint(lambda value: forward(value, *args, **kwargs), hidden)

    return run


def shared_layer(network: PreTrainedModel) -> tuple[AlbertTransformer, nn.Module, int] | None:
    """The encoder, its one layer and how often that is applied; None if layers differ or draw random numbers."""
    config = network.config
    encoders = [module for module in network.modules() if isinstance(module, AlbertTransformer)]
    if not encoders or config.num_hidden_groups != 1 or config.num_hidden_layers < 2:
        return None
    if config.hidden_dropout_prob or config.attention_probs_dropout_prob:
        return None
    return encoders[0], encoders[0].albert_layer_groups[0], config.num_hidden_layers


def run_shared_layer_by(encoder: AlbertTransformer, run: Run) -> None:
    """Have the encoder apply its shared layer by `run` instead of by a call for each application."""

    def forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any) -> BaseModelOutput:
        wanted = [name for name, value in others.items() if value is True]
        if wanted:
            raise RuntimeError(f"a looped encoder returns only its last state, not {', '.join(wanted)}")
        return BaseModelOutput(
            last_hidden_state=run(encoder.embedding_hidden_mapping_in(hidden_states), attention_mask)
        )

    encoder.forward = forward


def freeze(network: PreTrainedModel, *, embeddings: bool, layers: int) -> None:
    """Freeze the encoder's embeddings (if `embeddings` or `layers`) and its first `layers` layers. Their dropout stays.
    InputError for more layers than there are, and for an encoder that shares one layer.
    """
    base = network.base_model
    frozen: list[nn.Module] = []
    if embeddings or layers:
        frozen.append(getattr(base, "embeddings", base.get_input_embeddings()))
    if layers:
        check(
            not any(isinstance(module, AlbertTransformer) for module in base.modules()),
            f"model.freeze_layers={layers}: {network.config.model_type} shares one layer over its whole depth, which "
            "cannot be frozen in part; set it to 0 (model.freeze_embeddings=true is possible)",
        )
        all_layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
        check(
            layers <= len(all_layers),
            f"model.freeze_layers={layers}, but this {network.config.model_type} has {len(all_layers)} layers",
        )
        frozen += all_layers[:layers]
    for module in frozen:
        module.requires_grad_(False)


def frozen_layers(network: PreTrainedModel) -> int:
    """The number of frozen layers."""
    layers = [module for module in network.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return sum(not any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers)
