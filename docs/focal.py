"""Own code for --import: the focal loss (https://arxiv.org/abs/1708.02002), Cohen's kappa, SGD, a stepwise rate."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from sklearn.metrics import cohen_kappa_score

from train.config import OptimConfig, setting
from train.config.tasks import ClassifyConfig
from train.data.batches.masking import IGNORE_INDEX
from train.parallel.optim import OptimizerSpec, add_moments
from train.tasks import TASKS as KNOWN
from train.tasks import Metric
from train.tasks.classify import Classification


@dataclass(kw_only=True)
class FocalConfig(ClassifyConfig):
    kind: str = "focal"
    # the higher, the less a text counts whose label is certain already
    gamma: float = setting(2.0, least=0)


class Focal(Classification):
    metric_names = (*Classification.metric_names, "kappa")

    def loss_of(self, logits, inputs):
        losses = F.cross_entropy(
            logits.float(), inputs["labels"], ignore_index=IGNORE_INDEX, reduction="none"
        )
        return ((1 - torch.exp(-losses)) ** self.cfg.gamma * losses).sum()

    def score(self, truth, predicted):
        return {
            **super().score(truth, predicted),
            "kappa": float(cohen_kappa_score(truth, predicted)),
        }


@dataclass(kw_only=True)
class SGDConfig(OptimConfig):
    name: str = "sgd"
    lr: float = setting(0.01, above=0)  # more than a recipe for Adam has
    momentum: float = setting(0.9, least=0, below=1)


def sgd(cfg, groups, _):
    optimizer = torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum)
    add_moments(optimizer, "momentum_buffer")
    return optimizer


CLASSIFY = KNOWN["classify"]
METRICS = (Metric("kappa"), *CLASSIFY.metrics)  # the first one leads the report
TASKS = {
    "focal": replace(CLASSIFY, settings=FocalConfig, module=f"{__name__}:Focal", metrics=METRICS)
}
OPTIMIZERS = {"sgd": OptimizerSpec(sgd, settings=SGDConfig)}
# of the peak, by the share of the run that is left
SCHEDULES = {"steps": lambda left, cfg: 1.0 if left > 0.5 else 0.1}
