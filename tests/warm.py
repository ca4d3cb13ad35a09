"""What the forks of tests share (see forks.py): this project's modules, and what Hydra keeps of a first composition."""

from __future__ import annotations

import importlib

from train.config import TrainConfig
from train.run.compose import load_config

for name in (
    "launch.commands",
    "matplotlib.figure",
    "train.entry",
    "train.loop",
    "train.observe.card",
    "train.observe.curves",
    "train.parallel.data",
    "train.parallel.ddp",
    "train.tasks.classify",
    "train.tasks.mlm",
    "train.tools.predict",
    "train.tools.report",
    "transformers.models.bert.modeling_bert",
    "transformers.models.modernbert.modeling_modernbert",
):
    importlib.import_module(name)
load_config(TrainConfig, ["run_dir=any", "data.path=any", "max_steps=1", "micro_batch_size=1"])
