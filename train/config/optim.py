"""Settings of the optimizer and of its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from train.config.checks import check, check_at_least, check_choice, check_positive


@dataclass(kw_only=True)
class OptimConfig:
    name: str = "adamw"  # key of train.optim.OPTIMIZERS
    lr: float = 1e-3  # peak; with lr_scaling, at reference_batch_size
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    head_lr: float | None = None  # peak of the task's head, which begins with random weights; None: lr
    weight_decay: float = 0.01  # not applied to biases and normalisation weights
    max_grad_norm: float | None = 1.0  # gradients are clipped to this global norm; None: no clipping
    schedule: str = "linear"  # after the warm-up: linear | cosine | polynomial | constant
    decay_from_start: bool = False  # the decay is counted from the first step, not from the end of the warm-up
    power: float = 1.0  # exponent of the polynomial decay
    final_lr_fraction: float = 0.0  # share of lr that is left at the last step
    warmup_steps: int | None = None  # None: warmup_fraction of the run
    warmup_fraction: float = 0.1
    lr_scaling: str = "none"  # by global batch / reference_batch_size: none | linear | sqrt
    reference_batch_size: int | None = None  # sequences; linear and sqrt need it

    def __post_init__(self) -> None:
        check_choice("optim.lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))
        check_positive("optim.", self, "lr", "head_lr", "eps", "max_grad_norm", "power", "reference_batch_size")
        check_at_least("optim.", self, weight_decay=0, warmup_steps=0)
        valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(valid, f"optim.betas={list(self.betas)} must be two numbers in [0, 1)")
        for name in ("warmup_fraction", "final_lr_fraction"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"optim.{name}={value} must lie between 0 and 1")
        check(
            self.lr_scaling == "none" or self.reference_batch_size is not None,
            f"optim.lr_scaling={self.lr_scaling} needs optim.reference_batch_size, the batch optim.lr is for",
        )
