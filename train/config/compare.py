"""Settings of a comparison: a training run, and the variants in which it is run."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.config.checks import Section, check, setting
from train.config.train import TrainConfig

TOLERANCE = 0.01  # seeds and orders of floating-point sums move the scores of fine-tuning by about as much


@dataclass(kw_only=True)
class VariantsConfig(Section, prefix="compare."):
    run: list[str] = field(default_factory=list)  # names of the variants to run, the baseline first; empty: all
    variants: dict[str, str] = field(default_factory=dict)  # by name, the settings in which each differs, as typed
    largest_batch: dict[str, int] = field(default_factory=dict)  # by variant, the largest micro batch that fits: one
    # more run with this batch, without accumulation
    ranks: int = setting(1, above=0)  # of this machine; above 1 each run is started by torchrun
    tolerance: float = setting(TOLERANCE, least=0)  # share of the baseline's last score by which equal ones may differ
    output: str | None = None  # folder of the page; None: report/ in run_dir, for a run_dir in S3 here

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, names in (("run", self.run), ("largest_batch", self.largest_batch)):
            unknown = [name for name in names if name not in self.variants]
            known = ", ".join(self.variants) or "none is set"
            check(not unknown, f"compare.{key} names {', '.join(unknown)}; compare.variants has: {known}")
        check(len(set(self.run)) == len(self.run), f"compare.run=[{','.join(self.run)}] names a variant twice")
        smallest = min(self.largest_batch.values(), default=1)
        check(smallest > 0, f"compare.largest_batch has {smallest}; it must be above 0")

    @property
    def names(self) -> list[str]:
        return self.run or list(self.variants)


@dataclass(kw_only=True)
class CompareConfig(TrainConfig):
    """A training run in several variants: `python -m train.compare --cfg job` prints it."""

    compare: VariantsConfig = field(default_factory=VariantsConfig)
