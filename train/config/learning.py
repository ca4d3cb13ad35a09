"""Settings of the task, the model, the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from train.config.checks import Section, Unset, check, setting
from train.config.data import DataConfig, RecordsConfig

WSD = "wsd"  # warm-up, stable, decay: https://arxiv.org/abs/2404.06395
DECAY_FRACTION = 0.1  # of a run of wsd; section 4 of the paper needs no more
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flex_attention")
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
    kind: str = MISSING  # The name of the task in train.tasks.TASKS; task=... sets it.

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        """Return the size of the head for sequences of `seq_len` tokens; `labels` is 0 before the data is read."""
        raise NotImplementedError


@dataclass(kw_only=True)
class ModelConfig(Section, prefix="model."):
    """A Hugging Face encoder: made from sizes, or read from a checkpoint. None leaves a size to the architecture."""

    pretrained: str | None = None  # The Hub id or folder of a model's configuration and weights; sizes that are set
    # must agree.
    init_from: str | None = None  # The Hub id or folder of a model, or a run_dir, in S3 too; it is taken instead of
    # pretrained.
    tokenizer: str | None = None  # The Hub id, folder or run of a tokenizer, for tasks on records; None is that of the
    # weights.
    attention: str = setting("auto", among=ATTENTIONS)  # The way in which transformers computes attention; auto takes
    # sdpa where the architecture has it, else eager. The last two need a CUDA device; flash_attention_2 also needs its
    # package.
    freeze_embeddings: bool = False  # Keep the embeddings as they are.
    freeze_layers: int = setting(0, least=0)  # The bottom layers not to train; if above 0, embeddings are kept too.
    new_head: bool = False  # Replace a checkpoint's head that is for other labels, instead of rejecting it.
    architecture: str = "albert"  # The `model_type` of transformers, for a model made from sizes.
    vocab_size: int | None = setting(None, above=0)  # The size of the vocabulary; None takes the tokenizer's.
    max_positions: int | None = setting(None, above=0)  # The length of the longest sequence in tokens.
    embedding_size: int | None = setting(None, above=0)  # The width of embeddings that are factorised.
    hidden_size: int | None = setting(None, above=0)  # The width of the layers, a multiple of num_heads.
    intermediate_size: int | None = setting(None, above=0)  # The width inside the feed-forward part of a layer.
    num_layers: int | None = setting(None, above=0)  # The number of transformer layers.
    num_heads: int | None = setting(None, above=0)  # The number of attention heads of a layer.
    initializer_range: float | None = setting(None, above=0)  # The standard deviation of random weights.
    hidden_dropout: float | None = setting(None, least=0, below=1)  # The share of hidden values that is dropped.
    attention_dropout: float | None = setting(None, least=0, below=1)  # The share of attention weights that is dropped.

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
    name: str = "adamw"  # The name of the optimizer in train.parallel.optimizers.OPTIMIZERS; optim=... sets it.
    lr: float = setting(1e-3, above=0)  # The peak of the learning rate.
    betas: tuple[float, float] = (0.9, 0.999)  # The decay of the running means of gradients and of their squares.
    eps: float = setting(1e-6, above=0)  # The addend of the root of the second moment, by which updates are divided.
    head_lr: float | None = setting(None, above=0)  # The peak rate of the task's head, which begins random; None is lr.
    weight_decay: float = setting(0.01, least=0)  # The decay, but not of biases and normalisation weights.
    max_grad_norm: float | None = setting(1.0, above=0)  # The global norm that gradients are clipped to; None is none.
    layer_decay: float | None = setting(None, above=0, most=1)  # The factor between the rate of a layer and that of the
    # next one towards the head, the embeddings being the lowest layer; None is one rate for all layers.
    schedule: str = "linear"  # The course of the rate after the warm-up: linear, cosine, polynomial, constant or wsd,
    # which is constant and falls at the end, so that another length only moves the decay.
    decay_from_start: bool = False  # Count the decay from the first step instead of the end of the warm-up.
    power: float = setting(1.0, above=0)  # The exponent of the polynomial decay.
    decay_fraction: float | None = setting(None, least=0, below=1)  # The share of a run of wsd in which the rate falls;
    # None is a tenth.
    final_lr_fraction: float = setting(0.0, least=0, most=1)  # The share of lr that is left at the last step.
    warmup_steps: int | None = setting(None, least=0)  # The warm-up in steps; None takes warmup_fraction.
    warmup_fraction: float = setting(0.1, least=0, most=1)  # The share of the run in which the rate rises.

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(valid, f"optim.betas={list(self.betas)} must be two numbers in [0, 1)")
        if self.schedule == WSD:
            check(not self.decay_from_start, "optim.decay_from_start=true is not for optim.schedule=wsd; leave it out")
            if self.warmup_steps is None:
                raise Unset(
                    "optim.schedule=wsd needs optim.warmup_steps, a number of steps: a share of the run would change "
                    "with its length, which a run of wsd may get anew"
                )
        else:
            check(
                self.decay_fraction is None,
                f"optim.decay_fraction={self.decay_fraction} is for optim.schedule=wsd; leave it out, or set that",
            )

    def decay_begin(self, total_steps: int) -> int:
        """Return the step at which a wsd schedule begins to lower the rate; `total_steps` if it never does."""
        fraction = DECAY_FRACTION if self.decay_fraction is None else self.decay_fraction
        return total_steps - round(total_steps * fraction)
