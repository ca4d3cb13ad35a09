"""A transformers model with the operations that backends and tasks need, for every architecture and head."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.albert.modeling_albert import AlbertLayerGroup, AlbertTransformer
from transformers.utils import import_utils
from transformers.utils.logging import disable_progress_bar

from train.config import Failure, HeadSize, check
from train.models.model_sizes import shape_of
from train.storage.folders import Folder, is_full

# checkpoint(function, *tensors) returns function(*tensors), and computes it again in the backward pass.
Checkpoint = Callable[..., Any]
HIDDEN = -1e4  # added to the scores of padding: its exp() is 0 in every precision, and no sum with it overflows
# With model.attention=auto, models with more positions do not compute attention by matrix products, because that keeps
# 2 bytes per layer, head and pair of tokens.
MOST_POSITIONS = 1024
# These architectures use a mask [B, 1, 1, S] unchanged. Those in ADDING add it to the scores; those in CHOOSING treat
# 0 as padding and 1 as a token. All other architectures get the plain mask [B, S].
ADDING = ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
CHOOSING = ("deberta", "deberta-v2")
# An answer of these architectures also depends on how many tokens of padding follow a row, in spite of the mask:
# through convolutions, Fourier transforms, pooled or averaged positions, or the embedding of the next token.
READING_PADDING = ("convbert", "fnet", "mobilebert", "nystromformer")
# These architectures make a mask of ones if they are given none.
MAKING_MASKS = (
    "big_bird",
    "convbert",
    "luke",
    "megatron-bert",
    "nystromformer",
    "rembert",
    "roformer",
    "squeezebert",
)
# transformers makes special masks for these kinds of attention
OWN_MASKS = ("flash_attention_2", "flex_attention")
DROPOUTS_OF_ATTENTION = ("attention_probs_dropout_prob", "attention_dropout")
ENCODERS = ("encoder", "transformer")  # names of the module that contains all layers
# GPUs multiply matrices fast if a row has a multiple of 16 bytes: 8 numbers of 16 bits. NVIDIA's guide to matrix
# products advises multiples of 64 numbers, so that no tile of a product is only partly used.
ALIGNED, LOGITS = 8, 64
WHOLE_GRAPHS = 2  # graphs of a whole encoder: one for training and one for evaluation
# The projections of ALBERT's and ELECTRA's embeddings to the hidden size.
PROJECTIONS = ("embedding_hidden_mapping_in", "embeddings_project")


class Network(nn.Module):
    """A transformers model with the operations that backends and tasks need."""

    head_share = 0.0  # fraction of positions that the head reads; about 0 if it reads one token

    def __init__(
        self, network: PreTrainedModel, new: frozenset[str] = frozenset(), attention: str = "auto"
    ) -> None:
        """Wrap a model. `new` names the parameters that the checkpoint lacked; `attention` is model.attention."""
        super().__init__()
        self.attention = attention
        self.network = network.train()  # transformers returns pretrained models in eval mode
        self.new = new
        # To warn about padding without a mask, some models would read tokens in each step, and wait for the device.
        network.base_model.warn_if_padding_and_no_attention_mask = lambda *_: None
        self.has_segments = getattr(network.config, "type_vocab_size", 0) >= 2
        # dtype of attention scores; None: the weights' dtype
        self.mask_dtype: torch.dtype | None = None

    @property
    def makes_masks(self) -> bool:
        """True if the model makes a mask even if it is given none."""
        return self.network.config.model_type in MAKING_MASKS

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs that the network is fed, for transformers' tokenizer."""
        reads = signature(type(self.network).forward).parameters
        is_fed = {"token_type_ids": self.has_segments, "attention_mask": "attention_mask" in reads}
        return ["input_ids", *(name for name, fed in is_fed.items() if fed)]

    def segments(self, token_type_ids: Tensor) -> dict[str, Tensor]:
        """Return the segments as a keyword argument; {} if the architecture does not distinguish segments."""
        if self.has_segments:
            return {"token_type_ids": token_type_ids}
        return {}

    def mask(self, real: Tensor) -> Tensor:
        """Return the attention mask in the architecture's form; `real` [B, S] is 1 at tokens and 0 at padding.

        transformers uses a mask of four dimensions unchanged, and makes one from a mask [B, S] in every forward pass.
        """
        if self.attention in OWN_MASKS:
            return real
        kind = self.network.config.model_type
        dtype = self.network.get_input_embeddings().weight.dtype
        if kind in ADDING:
            return (1 - real[:, None, None].to(self.mask_dtype or dtype)) * HIDDEN
        if kind in CHOOSING:
            return real[:, None, None].to(dtype)
        return real

    def head_parameters(self) -> list[nn.Parameter]:
        """Return trained parameters that are outside the encoder, or that the checkpoint lacked (the pooler's)."""
        encoder = set(self.network.base_model.parameters())
        named = self.network.named_parameters()
        return [
            p for name, p in named if p.requires_grad and (p not in encoder or name in self.new)
        ]

    def train_flops(self, head: HeadSize, seq_len: int) -> float | None:
        """Return the FLOPs needed to train on one sequence of `seq_len` tokens; None if no formula is known."""
        shape = shape_of(self.network.config.to_dict())
        if shape is None:
            return None
        layers = (
            layer
            for layer in repeated_layers(self.network)
            if isinstance(layer, GradientCheckpointingLayer)
        )
        frozen = sum(
            not any(weight.requires_grad for weight in layer.parameters()) for layer in layers
        )
        return shape.train_flops(head, seq_len=seq_len, frozen=frozen)

    def attend_by_products(self, dtype: torch.dtype) -> None:
        """Compute attention by matrix products in `dtype` instead of SDPA. The scores are kept for the backward pass.

        Nothing changes if model.attention is sdpa, or if it is auto and the model has over MOST_POSITIONS positions.
        """
        positions = getattr(self.network.config, "max_position_embeddings", None) or 0
        if self.attention == "eager" or (self.attention == "auto" and positions <= MOST_POSITIONS):
            self.network.set_attn_implementation("eager")
            self.mask_dtype = dtype

    def leave_out_padding(self) -> None:
        """Let the layers read training batches without their padding, if they can and there is any."""
        return

    def recompute_layers(self, checkpoint: Checkpoint) -> None:
        """Keep only the input of each layer for the backward pass. Raises InputError if no layer is known.

        transformers' gradient checkpointing ignores ALBERT, and its default implementation does not suit XLA.
        """
        for layer in self.known_layers():
            layer.forward = recomputed(layer.forward, checkpoint, layer)

    def narrow_norms(self, dtype: torch.dtype) -> list[RemovableHandle]:
        """Make each norm, which autocast computes in fp32, return `dtype`. Returns the hooks, which can be removed.

        The hidden states that pass from layer to layer then take half the memory. Weights and gradients remain fp32.
        """
        norms = filter(is_norm, self.network.modules())
        return [module.register_forward_hook(partial(_returned_in, dtype)) for module in norms]

    def join_projections(self) -> None:
        """Compute a layer's queries, keys and values by one matrix product, which uses a GPU better than three.

        The weights are concatenated in each pass and remain three parameters. Only architectures in ADDING are changed.
        """
        if self.network.config.model_type not in ADDING:
            return
        for module in self.network.modules():
            for names in (("query", "key", "value"), ("q_lin", "k_lin", "v_lin")):
                parts = [getattr(module, name, None) for name in names]
                if all(type(part) is nn.Linear for part in parts):
                    _join(*parts)  # type: ignore[arg-type]

    def keep_relative_positions(self) -> None:
        """Compute DeBERTa's relative positions [1, S, S] once for each length S, instead of in every pass.

        Version 2, which is also that of DeBERTa v3, copies a number from the host to compute them. A CUDA graph cannot
        contain this. Do not call this for XLA, which computes them inside its graph.
        """
        known: dict[tuple[int, torch.device], Tensor | None] = {}

        def give(module: Any, args: Any, options: Any) -> Any:
            hidden = args[0]
            key = (hidden.size(1), hidden.device)
            if key not in known:
                known[key] = module.get_rel_pos(hidden)
            return args, {**options, "relative_pos": known[key]}

        encoder = self.encoder
        if encoder is not None and hasattr(encoder, "get_rel_pos"):
            encoder.register_forward_pre_hook(give, with_kwargs=True)

    def widen_transforms(self) -> None:
        """Compute FNet's Fourier transforms in fp32, as autocast does on CPUs: those of CUDA devices take no bf16."""
        for module in self.network.modules():
            if hasattr(module, "fourier_transform"):
                module.register_forward_pre_hook(
                    lambda _, inputs: (inputs[0].float(), *inputs[1:])
                )

    def align_logits(self) -> None:
        """Compute logits with rows of a multiple of LOGITS numbers, unless the vocabulary is a multiple of ALIGNED.

        A GPU takes longer for misaligned rows. Each pass adds zeros to the weight and leaves the extra logits out, so
        that weights, checkpoints and results keep the vocabulary's size.
        """
        decoder = self.network.get_output_embeddings()
        if type(decoder) is nn.Linear and decoder.out_features % ALIGNED:
            decoder.forward = partial(_aligned, decoder)  # type: ignore[method-assign]

    def compile_layers(self, optimised: Callable[[Any], Any], *, widens: bool = False) -> int:
        """Replace each layer's forward by `optimised(forward)`. Returns the number of graphs per input shape.

        Each kind of layer has one graph for training and one for evaluation. `widens`: norms return fp32 while matrix
        products return 16 bits. Raises InputError if no layer is known.
        """
        first = next(
            (weight for weight in self.network.parameters() if weight.requires_grad), None
        )
        layers = self.known_layers()
        if widens:  # a projection before the layers must return the norms' dtype, so that all layers share a graph
            for name, module in self.network.named_modules():
                if name.endswith(PROJECTIONS):
                    module.register_forward_hook(partial(_returned_in, torch.float32))
        training, evaluation = set(), set()
        for layer in layers:
            weights = list(layer.parameters())
            kind = (type(layer), *((weight.shape, weight.requires_grad) for weight in weights))
            evaluation.add(kind)
            # If frozen layers precede the first trained layer, it has another graph: its input needs no gradient.
            training.add((kind, any(weight is first for weight in weights)))
            layer.forward = optimised(layer.forward)
        return len(training) + len(evaluation)

    def compile_encoder(self, optimised: Callable[[Any], Any]) -> int:
        """Replace `encoder`'s forward, or the whole model's if `encoder` is None, by `optimised(forward)`.

        Returns the number of graphs per input shape. `encoder` excludes the embeddings, because compiled kernels would
        add their gradients in varying order. It also excludes the mask's construction: inside a graph, transformers
        makes a mask even if it hides nothing, and attention would read it.
        """
        module = self.encoder or self
        module.forward = optimised(module.forward)
        return WHOLE_GRAPHS

    @property
    def encoder(self) -> nn.Module | None:
        """The module that contains only the layers; None if the architecture has no such module."""
        parts = (getattr(self.network.base_model, name, None) for name in ENCODERS)
        return next((part for part in parts if isinstance(part, nn.Module)), None)

    def drawn_numbers(self, rows: int, length: int) -> int:
        """Return how many random numbers attention's dropout draws in a pass over `rows` rows of `length` tokens.

        This counts SDPA that reads a mask or computes in fp32, which draws one for each pair of tokens. Without a mask,
        SDPA in 16 bits draws few, and other attention too.
        """
        config = self.network.config
        rates = [getattr(config, name, 0.0) for name in DROPOUTS_OF_ATTENTION]
        if config._attn_implementation != "sdpa" or not any(rates):
            return 0
        return int(config.num_hidden_layers * config.num_attention_heads * rows * length**2)

    def known_layers(self) -> list[Any]:
        layers = repeated_layers(self.network)
        check(
            bool(layers),
            f"the layers of {type(self.network).__name__} are not known: choose parallel=data, and leave out "
            "backend.compile=layers and backend.activation_checkpointing",
        )
        return layers

    def separate_layers(self) -> list[nn.Module]:
        """Return the layers if they have separate weights, else []. Raises InputError if no layer is known."""
        layers = self.known_layers()
        return layers if len(layers) >= self.network.config.num_hidden_layers else []

    def export(self, folder: Path, files: Mapping[str, bytes] = {}) -> None:
        """Write the weights in float32, for from_pretrained of `transformers`, and `files` beside them.

        float32 weights in host memory, or in a memory-mapped file, are written without a copy.
        """
        with torch.device("meta"):  # only names, shapes and ties
            plain = type(self.network)(deepcopy(self.network.config))
        types = {name: value.dtype for name, value in plain.state_dict().items()}
        weights = {
            name: value.cpu().to(types[name]) for name, value in self.network.state_dict().items()
        }
        plain.load_state_dict(weights, assign=True)
        plain.tie_weights()
        self.finish(plain)
        disable_progress_bar()  # saving takes a fraction of a second
        try:
            plain.save_pretrained(folder)
        except Exception as error:
            if is_full(error):
                raise Failure(
                    f"cannot write {folder}: the disk is full; free some space"
                ) from error
            raise
        # the library makes these files private, whatever the umask
        for path in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", path)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    def describe(self, folder: Folder, files: Mapping[str, bytes]) -> None:
        """Write config.json and `files` to model/: with them, a checkpoint can be exported without the data."""
        config = deepcopy(self.network.config)
        config.architectures = [type(self.network).__name__]
        for name, content in files.items():
            folder.write(f"model/{name}", content)
        folder.write("model/config.json", config.to_json_string().encode())

    def finish(self, plain: PreTrainedModel) -> None:
        """Convert modules of `plain`, the model to be exported, to the form that exports need."""
        return


@contextmanager
def with_unread_masks(*, given: bool) -> Iterator[None]:
    """Make transformers use a mask if one is `given`, or made by the model, and none otherwise, without reading it.

    Otherwise it would read which tokens are padding in order to drop masks that hide nothing, except while a CUDA graph
    is recorded. Reading waits for the device, so a CUDA graph cannot contain it.
    """
    is_recording = getattr(import_utils, "is_cuda_stream_capturing", lambda: False)
    import_utils.is_cuda_stream_capturing = lambda: given
    try:
        yield
    finally:
        import_utils.is_cuda_stream_capturing = is_recording


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over features: PyTorch's, or one of transformers' RMS norms."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(
        "RMSNorm"
    )


def _returned_in(dtype: torch.dtype, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.to(dtype)


def _aligned(decoder: nn.Linear, hidden: Tensor) -> Tensor:
    """Return what `decoder` returns for `hidden` [..., H], a part of a tensor whose rows are aligned."""
    weight: Tensor = decoder.weight
    bias: Tensor | None = decoder.bias
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        # Autocast would do so after the zeros are added, which would take longer.
        weight = weight.to(torch.get_autocast_dtype(device))
    extra = -decoder.out_features % LOGITS
    weight = F.pad(weight, (0, 0, 0, extra))
    if bias is not None:
        bias = F.pad(bias, (0, extra))
    return F.linear(hidden, weight, bias)[..., : decoder.out_features]


def _join(query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
    """Make `query`, which a layer calls first, also compute the results of `key` and `value`."""
    waiting: dict[str, Tensor] = {}

    def project(input: Tensor) -> Tensor:
        weight = torch.cat([query.weight, key.weight, value.weight])
        bias = torch.cat([query.bias, key.bias, value.bias])
        queries, waiting["key"], waiting["value"] = F.linear(input, weight, bias).chunk(3, -1)
        return queries

    query.forward = project  # type: ignore[method-assign]
    key.forward = lambda input: waiting.pop("key")  # type: ignore[method-assign]
    value.forward = lambda input: waiting.pop("value")  # type: ignore[method-assign]


def repeated_layers(network: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a network in order; a shared layer appears only once."""
    return [
        module
        for module in network.modules()
        if isinstance(module, GradientCheckpointingLayer | AlbertLayerGroup)
    ]


def recomputed(
    forward: Callable[..., Any], checkpoint: Checkpoint, layer: nn.Module
) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not layer.training or not hidden.requires_grad:
            return forward(hidden, *args, **kwargs)
        return checkpoint(lambda value: forward(value, *args, **kwargs), hidden)

    return run


def freeze(network: PreTrainedModel, layers: int) -> None:
    """Freeze the embeddings and the first `layers` layers.

    Raises InputError if the model has fewer layers, or if they share weights.
    """
    base = network.base_model
    check(
        not any(isinstance(module, AlbertTransformer) for module in base.modules()),
        f"model.freeze_layers={layers}: {network.config.model_type} shares one layer over its whole depth, which "
        "cannot be frozen in part; set it to 0",
    )
    all_layers = repeated_layers(base)
    check(
        layers <= len(all_layers),
        f"model.freeze_layers={layers}, but this {network.config.model_type} has {len(all_layers)} layers",
    )
    embeddings = getattr(base, "embeddings", base.get_input_embeddings())
    for module in (embeddings, *all_layers[:layers]):
        module.requires_grad_(False)
