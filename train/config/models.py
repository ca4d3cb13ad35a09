"""Settings of the model."""

from __future__ import annotations

from dataclasses import dataclass

from train.config.checks import Unset, check, check_at_least, check_positive

TO_BE_GIVEN = "(to be given)"  # model.pretrained in conf/model/pretrained.yaml


@dataclass(kw_only=True)
class ModelConfig:
    """A Hugging Face encoder: made from sizes, or read from a checkpoint."""

    pretrained: str | None = None  # Hub id or folder; its configuration and weights are used, sizes below must agree
    init_from: str | None = None  # the same, or the run_dir of a run, in S3 too; replaces pretrained
    tokenizer: str | None = None  # Hub id, folder or run, for tasks on records; None: the one of the weights
    freeze_embeddings: bool = False  # embeddings are not trained
    freeze_layers: int = 0  # number of layers, from the bottom, that are not trained, nor the embeddings then
    new_head: bool = False  # drop a checkpoint's head that is for other labels, instead of refusing it
    architecture: str = "albert"  # `model_type` of transformers, for a model made from sizes
    vocab_size: int | None = None  # None: the size of the tokenizer that prepared the data
    max_positions: int | None = None  # longest sequence in tokens; None here and below: the architecture's default
    embedding_size: int | None = None  # for architectures that factorise the embedding
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    hidden_dropout: float | None = None
    attention_dropout: float | None = None

    def __post_init__(self) -> None:
        sizes = ("embedding_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        check_positive("model.", self, "vocab_size", "max_positions", *sizes)
        if self.init_from is not None:
            self.pretrained = None
        if self.pretrained == TO_BE_GIVEN:
            raise Unset(
                "model.pretrained is not set: give model.pretrained=... (a Hub id or folder), or model.init_from"
            )
        check_at_least("model.", self, freeze_layers=0)
        for name in ("hidden_dropout", "attention_dropout"):
            value = getattr(self, name)
            check(value is None or 0 <= value < 1, f"model.{name}={value} must lie in [0, 1)")
        if self.hidden_size and self.num_heads:
            check(
                self.hidden_size % self.num_heads == 0,
                f"model.hidden_size={self.hidden_size} must be a multiple of model.num_heads={self.num_heads}",
            )
