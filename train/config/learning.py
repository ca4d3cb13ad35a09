"""Settings of the model, the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from train.config.checks import Section, check, setting

WSD = "wsd"  # warm-up, stable, decay: https://arxiv.org/abs/2404.06395
FROM_START = "linear_from_start"
# default share of a wsd run in which the learning rate decays: section 4 of the paper
DECAY_FRACTION = 0.1
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flex_attention")
# The settings that say what a model is. The others name files, or say how the model is trained.
OF_A_MODEL = (
    *(
        "architecture",
        "attention",
        "vocab_size",
        "max_positions",
        "embedding_size",
        "hidden_size",
        "intermediate_size",
    ),
    *("num_layers", "num_heads", "initializer_range", "hidden_dropout", "attention_dropout"),
)


@dataclass(kw_only=True)
class ModelConfig(Section, prefix="model."):
    """A Hugging Face encoder, built from sizes or read from a checkpoint. None means the architecture's default."""

    # The model whose weights the run begins with: a Hub id, a folder of transformers, or a run_dir on disk or in S3.
    # Sizes that are also set must match it.
    pretrained: str | None = None
    # The Hub id, folder or run_dir of a tokenizer, for tasks on records; None uses the tokenizer of the weights.
    tokenizer: str | None = None
    # The attention implementation of transformers; auto uses sdpa if the architecture supports it, otherwise eager.
    # flash_attention_2 and flex_attention need a CUDA device, and flash_attention_2 also needs its package.
    attention: str = setting("auto", among=ATTENTIONS)
    # The number of bottom layers to freeze; any number above 0 also freezes the embeddings.
    freeze_layers: int = setting(0, least=0)
    # Replace the head of a checkpoint that was trained for other labels, instead of rejecting the checkpoint.
    new_head: bool = False
    # The `model_type` of transformers, for a model built from sizes.
    architecture: str = "albert"
    # The size of the vocabulary; None uses the tokenizer's.
    vocab_size: int | None = setting(None, above=0)
    # The length of the longest sequence in tokens.
    max_positions: int | None = setting(None, above=0)
    # The width of factorised embeddings.
    embedding_size: int | None = setting(None, above=0)
    # The width of the layers, a multiple of num_heads.
    hidden_size: int | None = setting(None, above=0)
    # The inner width of a layer's feed-forward block.
    intermediate_size: int | None = setting(None, above=0)
    # The number of transformer layers.
    num_layers: int | None = setting(None, above=0)
    # The number of attention heads per layer.
    num_heads: int | None = setting(None, above=0)
    # The standard deviation of the random initial weights.
    initializer_range: float | None = setting(None, above=0)
    # The dropout probability of hidden values.
    hidden_dropout: float | None = setting(None, least=0, below=1)
    # The dropout probability of attention weights.
    attention_dropout: float | None = setting(None, least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not self.hidden_size or not self.num_heads or self.hidden_size % self.num_heads == 0,
            f"model.hidden_size={self.hidden_size} must be a multiple of model.num_heads={self.num_heads}",
        )


@dataclass(kw_only=True)
class OptimConfig(Section, prefix="optim."):
    # The name of the optimizer in train.parallel.optim.OPTIMIZERS; optim=... sets it. Without it, a run that begins
    # with weights (model.pretrained) has optim=finetune.
    name: str = "adamw"
    # The peak learning rate.
    lr: float = setting(1e-3, above=0)
    # The decay rates of the running means of the gradient and of its square.
    betas: tuple[float, float] = (
        0.9,
        0.999,
    )
    # The constant added to the denominator of updates, the root of the second moment.
    eps: float = setting(1e-6, above=0)
    # The peak learning rate of the task's head, which starts with random weights; None uses lr.
    head_lr: float | None = setting(None, above=0)
    # The weight decay, which is not applied to biases and normalisation weights.
    weight_decay: float = setting(0.01, least=0)
    # The global norm to which gradients are clipped; None disables clipping.
    max_grad_norm: float | None = setting(1.0, above=0)
    # The learning rate schedule after the warm-up: linear, linear_from_start, cosine, constant or wsd.
    # linear_from_start counts the decay from the first step of the run instead of from the end of the warm-up, as
    # Google's BERT and ALBERT do. wsd is constant until a final decay, so that a different run length only moves the
    # decay.
    schedule: str = "linear"
    # The share of a wsd run in which the learning rate decays; None uses a tenth.
    decay_fraction: float | None = setting(None, least=0, below=1)
    # The learning rate at the last step, as a share of lr.
    final_lr_fraction: float = setting(0.0, least=0, most=1)
    # The length of the warm-up in steps; None uses warmup_fraction.
    warmup_steps: int | None = setting(None, least=0)
    # The length of the warm-up, in which the learning rate rises, as a share of the run.
    warmup_fraction: float = setting(0.1, least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(valid, f"optim.betas={list(self.betas)} must be two numbers in [0, 1)")
        check(
            self.schedule != WSD or self.warmup_steps is not None,
            "optim.schedule=wsd needs optim.warmup_steps, a number of steps: with a share, a longer run would have a "
            "longer warm-up",
        )
        check(
            self.schedule == WSD or self.decay_fraction is None,
            f"optim.decay_fraction={self.decay_fraction} needs optim.schedule=wsd; set that, or leave it out",
        )

    def decay_begin(self, total_steps: int) -> int:
        """Return the step at which a wsd schedule begins to lower the learning rate; `total_steps` if it never does."""
        fraction = DECAY_FRACTION if self.decay_fraction is None else self.decay_fraction
        return total_steps - round(total_steps * fraction)
