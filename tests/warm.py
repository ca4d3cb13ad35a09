"""What the forks of tests share (see forks.py): this project's modules, and what Hydra keeps of a first composition."""

from __future__ import annotations

from train import entry as entry
from train import loop as loop
from train.config import TrainConfig
from train.run.compose import load_config
from train.tasks.classify import task as task

load_config(TrainConfig, ["run_dir=any", "data.path=any", "max_steps=1", "micro_batch_size=1"])
