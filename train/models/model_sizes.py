"""An encoder's sizes, number of parameters, and training FLOPs, from its configuration. It does not import torch.

The default sizes are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from train.config import HeadSize, ModelConfig, TrainConfig
from train.data.files.errors import naming
from train.storage.folders import Folder, LocalFolder, is_s3, local_path
from train.storage.hub_access import asking_hub, fetched, is_at_hub
from train.storage.schema import BadContent, of_type, read_object

MOST = 10**9  # the largest size accepted, so that products of sizes fit into a float
# paths in transformers folders and in run folders
CONFIGS = ("config.json", "export/config.json", "model/config.json")


@dataclass(frozen=True)
class Shape:
    """An encoder's sizes, under their names in transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2  # number of segment types; 0 without segments
    embedding_size: int = 0  # width of ALBERT's factorised embedding; other models do not use it
    # number of ALBERT's groups of layers that share weights; other models do not use it
    num_hidden_groups: int = 1

    @property
    def is_albert(self) -> bool:
        return self.model_type == "albert"

    @property
    def is_modern(self) -> bool:
        """True for ModernBERT: gated feed-forward layers, no biases, no table of positions or segments."""
        return self.model_type == "modernbert"

    @property
    def ffn_products(self) -> int:
        """Number of matrix products in the feed-forward part of a layer."""
        return 3 if self.is_modern else 2

    @property
    def num_layer_weights(self) -> int:
        """Number of layers with weights of their own."""
        return self.num_hidden_groups if self.is_albert else self.num_hidden_layers

    @property
    def embedding_width(self) -> int:
        return self.embedding_size if self.is_albert else self.hidden_size

    def embedding_parameters(self) -> int:
        width = self.embedding_width
        if self.is_modern:
            return (self.vocab_size + 1) * width  # The extra row is a LayerNorm's weight.
        rows = self.vocab_size + self.max_position_embeddings + self.type_vocab_size
        return (rows + 2) * width  # The 2 extra rows are a LayerNorm's weight and bias.

    def layer_parameters(self) -> int:
        hidden, ffn = self.hidden_size, self.intermediate_size
        # The last term is two LayerNorms.
        weights = 4 * hidden**2 + self.ffn_products * hidden * ffn + 2 * hidden
        if self.is_modern:
            return weights
        return weights + 7 * hidden + ffn

    def trained_parameters(self, head: HeadSize, *, freeze_layers: int = 0) -> int:
        """Return the number of parameters with a gradient, not counting a label head's last layer (a few thousand)."""
        hidden = self.hidden_size
        layers = self.num_layer_weights
        total = 0
        if self.is_albert:
            # the projection from the embedding to the layers
            total += self.embedding_size * hidden + hidden
        else:
            layers = max(0, layers - freeze_layers)
        total += layers * self.layer_parameters()
        if not freeze_layers:
            total += self.embedding_parameters()
        # A dense layer, a LayerNorm and the logits' bias. The logits' weight is the embedding.
        if head.predictions:
            width = self.embedding_width
            total += hidden * width + 3 * width + self.vocab_size
        # The head has a dense layer or a pooler.
        if head.labels or (self.is_modern and head.token_labels):
            total += hidden**2 + hidden
        return total

    def train_flops(self, head: HeadSize, *, seq_len: int, frozen: int = 0) -> float:
        """Return the floating-point operations needed to train on one sequence of `seq_len` tokens, padding included.

        The lowest `frozen` layers have no backward pass. A multiply-add counts as 2 operations, and the backward pass
        as twice the forward pass. The usual estimate, 6 x parameters per token, is 8.5 times too low for ALBERT-base,
        whose layers share parameters but compute separately. Tests compare the result with torch.utils.flop_counter.
        """
        hidden, width = self.hidden_size, self.embedding_width
        layer = (
            6 * (4 * hidden**2 + self.ffn_products * hidden * self.intermediate_size)
            + 12 * seq_len * hidden
        )
        flops = seq_len * (self.num_hidden_layers - frozen * 2 / 3) * layer
        flops += head.predictions * 6 * width * (hidden + self.vocab_size)
        flops += seq_len * 6 * hidden * head.token_labels
        if self.is_albert:
            flops += seq_len * 6 * width * hidden
        if head.labels:
            flops += 6 * hidden * (hidden + head.labels)
        if self.is_modern and head.token_labels:
            flops += seq_len * 6 * hidden * hidden
        return flops


DEFAULTS = {  # transformers' default sizes, by architecture
    "albert": Shape("albert", 30_000, 4096, 16_384, 12, embedding_size=128),
    "bert": Shape("bert", 30_522, 768, 3072, 12),
    "roberta": Shape("roberta", 50_265, 768, 3072, 12),
    "xlm-roberta": Shape("xlm-roberta", 30_522, 768, 3072, 12),
    "camembert": Shape("camembert", 30_522, 768, 3072, 12),
    "distilbert": Shape("distilbert", 30_522, 768, 3072, 6, type_vocab_size=0),
    "modernbert": Shape("modernbert", 50_368, 768, 1152, 22, 8192, type_vocab_size=0),
}
# transformers' names of sizes, where an architecture has others than those of Shape.
THEIR_NAMES = {
    "distilbert": {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
    }
}


def find_shape(cfg: ModelConfig, *, vocab_size: int | None = None) -> Shape | None:
    """Return the sizes of the model that a run would train; None if only transformers knows them.

    A model at the Hub is asked for its config.json; without an answer, its sizes are unknown. `vocab_size` is the
    tokenizer's; None if unknown. A new model has this size unless cfg sets `vocab_size`.
    """
    source = cfg.pretrained
    if source is not None:
        folder = folder_of(source)
        if folder is None:
            return None
        return read_shape(LocalFolder(folder))
    default = DEFAULTS.get(cfg.architecture)
    if default is None:
        return None
    given = {
        "vocab_size": cfg.vocab_size or vocab_size,
        "max_position_embeddings": cfg.max_positions,
        "embedding_size": cfg.embedding_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
    }
    return replace(default, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def folder_of(source: str) -> Path | None:
    """Return the folder of a model on this machine, or one with the config.json of a model at the Hub."""
    if is_s3(source):
        return None
    if not is_at_hub(source):
        path = local_path(source)
        return path if path.is_dir() else None
    try:
        with asking_hub(source):
            return fetched(source, CONFIGS[:1])
    except (OSError, ValueError):  # There is no such model, or the Hub does not answer.
        return None


def check_layers(cfg: TrainConfig) -> None:
    """Raise InputError if a pipeline has more parts than layers."""
    if cfg.parallel.num_parts > 1:
        shape = find_shape(cfg.model)
        if shape is not None:
            cfg.parallel.check_layers(shape.num_hidden_layers)


def knows_vocabulary(cfg: ModelConfig, *, vocab_size: int | None = None) -> bool:
    """Return whether `find_shape` would know vocab_size without the architecture's default."""
    return bool(cfg.pretrained or cfg.vocab_size or vocab_size)


def read_shape(folder: Folder) -> Shape | None:
    """Return the sizes in a folder's config.json; None if missing or of unknown type. Raises InputError if damaged."""
    name = next((name for name in CONFIGS if folder.size(name) is not None), None)
    if name is None:
        return None
    with naming(f"{folder.location}/{name} is damaged", ()):
        return shape_of(read_object(folder.read(name)))


def shape_of_model(model: Any) -> Shape | None:
    """Return the sizes of a `Network`; None for other models, or if DEFAULTS has no such architecture."""
    network = getattr(model, "network", None)
    if network is None:
        return None
    return shape_of(network.config.to_dict())


def shape_of(values: dict[str, Any]) -> Shape | None:
    """Return the sizes in a config.json; None if DEFAULTS lacks its model_type. Raises BadContent if a size is bad."""
    default = DEFAULTS.get(str(values.get("model_type")))
    if default is None:
        return None
    names = THEIR_NAMES.get(default.model_type, {})
    sizes = {}
    for name in (item.name for item in fields(Shape) if item.name != "model_type"):
        value = values.get(names.get(name, name), values.get(name))
        if value is not None:
            number = of_type(int, value, name)
            is_possible = number > 0 or name == "type_vocab_size"
            if not is_possible or number > MOST:
                raise BadContent(f"{name}={number} is not a possible size")
            sizes[name] = number
    return replace(default, **sizes)
