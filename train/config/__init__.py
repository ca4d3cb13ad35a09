"""Every setting of a training run and of corpus preparation: name, type, unit, default and check.

The dataclasses of this package are the Hydra schema: an unknown key or a value of the wrong type is rejected before
anything starts. Defaults are defined only in this package; the files in `conf` contain only values that differ from
them. The package does not import torch, so that launchers and reports can read a configuration without it. None turns
a feature off, or derives the value; the setting's comment says which.
"""

# ruff: noqa: F401 -- these names are imported by other packages

from train.config.attempt import CheckpointConfig, LeaseConfig, WatchdogConfig
from train.config.backend import BackendConfig, InstanceConfig, XLAConfig
from train.config.checks import (
    Failure,
    InputError,
    NotPermitted,
    Section,
    Unreachable,
    check,
    check_choice,
    check_printable,
    check_values,
    leaves,
    plural,
    setting,
    shortlist,
)
from train.config.data import (
    ColumnsConfig,
    DataConfig,
    EvaluatedConfig,
    RecordsConfig,
    S3Config,
    ShardsConfig,
    check_endpoint,
)
from train.config.learning import FROM_START, OF_A_MODEL, WSD, ModelConfig, OptimConfig
from train.config.parallel import (
    SPLITS,
    DataParallelConfig,
    FSDPConfig,
    ParallelConfig,
    PipelineConfig,
)
from train.config.plan import Plan, make_plan
from train.config.prepare import (
    MIN_VOCAB_SIZE,
    CorpusConfig,
    FilesCorpusConfig,
    HFCorpusConfig,
    HFDataset,
    PrepareConfig,
)
from train.config.tasks import HeadSize, TaskConfig
from train.config.train import HubConfig, TelemetryConfig, TrainConfig, flat, flatten, to_dict
