"""Settings of the task, the model, the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from train.config.checks import Section, Unset, check, setting
from train.config.data import DataConfig, RecordsConfig

TO_BE_GIVEN = "(to be given)"  # model.pretrained in conf/model/pretrained.yaml


@dataclass(frozen=True)
class HeadSize:
    """The output of a task's head for a sequence, from which its FLOPs, parameters and memory follow."""

    predictions: int = 0  # positions at which every token of the vocabulary is scored
    eval_predictions: int = 0  # the same in an evaluation
    labels: int = 0  # scores of the sequence, by a dense layer and a classifier on one token
    token_labels: int = 0  # scores of each token


@dataclass(kw_only=True)
class TaskConfig(Section, prefix="task."):
    """Settings that every task has; those of a single task are in its package, in train/tasks."""

    learns_from: ClassVar[type[DataConfig]] = RecordsConfig
    kind: str = MISSING  # name of the task in train.tasks.TASKS; task=... sets it

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        """Return the size of the head for sequences of `seq_len` tokens; `labels` is 0 before the data is read."""
        raise NotImplementedError


@dataclass(kw_only=True)
class ModelConfig(Section, prefix="model."):
    """A Hugging Face encoder: made from sizes, or read from a checkpoint."""

    pretrained: str | None = None  # Hub id or folder; its configuration and weights are used, sizes below must agree
    init_from: str | None = None  # the same, or the run_dir of a run, in S3 too, instead of pretrained
    tokenizer: str | None = None  # Hub id, folder or run, for tasks on records; None: the one of the weights
    freeze_embeddings: bool = False  # embeddings are not trained
    freeze_layers: int = setting(0, least=0)  # layers, from the bottom, that are not trained, nor the embeddings then
    new_head: bool = False  # drop a checkpoint's head that is for other labels, instead of rejecting it
    architecture: str = "albert"  # `model_type` of transformers, for a model made from sizes
    vocab_size: int | None = setting(None, above=0)  # None: the size of the tokenizer that prepared the data
    max_positions: int | None = setting(None, above=0)  # longest sequence in tokens; None here and below: the
    # architecture's default
    embedding_size: int | None = setting(None, above=0)  # for architectures that factorise the embedding
    hidden_size: int | None = setting(None, above=0)  # width of the layers; a multiple of num_heads
    intermediate_size: int | None = setting(None, above=0)  # width inside the feed-forward part of a layer
    num_layers: int | None = setting(None, above=0)  # transformer layers
    num_heads: int | None = setting(None, above=0)  # attention heads of a layer
    initializer_range: float | None = setting(None, above=0)  # standard deviation of random weights
    hidden_dropout: float | None = setting(None, least=0, below=1)  # share of hidden values that is dropped
    attention_dropout: float | None = setting(None, least=0, below=1)  # share of attention weights that is dropped

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrained == TO_BE_GIVEN and self.init_from is not None:
            self.pretrained = None
        check(
            self.init_from is None or self.pretrained is None,
            f"model.init_from={self.init_from} and model.pretrained={self.pretrained} both name weights; leave one out",
        )
        if self.pretrained == TO_BE_GIVEN:
            raise Unset(
                "model.pretrained is not set: give model.pretrained=... (a Hub id or folder), or model.init_from"
            )
        check(
            not self.hidden_size or not self.num_heads or self.hidden_size % self.num_heads == 0,
            f"model.hidden_size={self.hidden_size} must be a multiple of model.num_heads={self.num_heads}",
        )


@dataclass(kw_only=True)
class OptimConfig(Section, prefix="optim."):
    name: str = "adamw"  # name of the optimizer in train.parallel.optimizers.OPTIMIZERS; optim=... sets it
    lr: float = setting(1e-3, above=0)  # peak
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the running means of gradients and of their squares
    eps: float = setting(1e-6, above=0)  # added to the root of the second moment, by which updates are divided
    head_lr: float | None = setting(None, above=0)  # peak of the task's head, whose weights begin random; None: lr
    weight_decay: float = setting(0.01, least=0)  # not applied to biases and normalisation weights
    max_grad_norm: float | None = setting(1.0, above=0)  # gradients are clipped to this global norm; None: no clipping
    schedule: str = "linear"  # after the warm-up: linear | cosine | polynomial | constant
    decay_from_start: bool = False  # the decay is counted from the first step, not from the end of the warm-up
    power: float = setting(1.0, above=0)  # exponent of the polynomial decay
    final_lr_fraction: float = setting(0.0, least=0, most=1)  # share of lr that is left at the last step
    warmup_steps: int | None = setting(None, least=0)  # None: warmup_fraction of the run
    warmup_fraction: float = setting(0.1, least=0, most=1)  # share of the run in which the rate rises

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(valid, f"optim.betas={list(self.betas)} must be two numbers in [0, 1)")
