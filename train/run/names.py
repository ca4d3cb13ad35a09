"""Names that users choose, in values of settings, and the settings that an unknown name may mean."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Any

import yaml

from train.config import check

TABLES = ("data.label_map", "data.more_validation", "compare.variants")
LABELS = "data.labels"
# Texts that need no quotation marks as values.
PLAIN = re.compile(r"(?!(null|true|false|inf|nan)$)[A-Za-z_/.][\w./:-]*", re.IGNORECASE)
# The settings that name the option of a group. Only the option sets them.
SELECTORS = {
    "task": "task.kind",
    "optim": "optim.name",
    "backend": "backend.name",
    "parallel": "parallel.name",
    "corpus": "corpus.kind",
}
# The names in transformers' Trainer and its scripts, and in other training programs, by our setting; for settings that
# only `train` or only `prepare` has, one name may be in two lines.
ELSEWHERE = """
run_dir: output_dir out_dir outdir save_dir output logging_dir
output: output_dir out_dir outdir save_dir run_dir
seq_len: max_seq_length max_length max_len max_seq_len block_size sequence_length seq_length
global_batch_size: batch_size train_batch_size total_batch_size gradient_accumulation_steps accumulation_steps bs
micro_batch_size: per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size device_batch_size
eval_batch_size: per_device_eval_batch_size per_gpu_eval_batch_size test_batch_size
max_epochs: num_train_epochs num_epochs epochs epoch n_epochs
max_steps: max_train_steps num_train_steps train_steps num_steps steps iterations
eval_every: eval_steps eval_strategy evaluation_strategy eval_interval
log_every: logging_steps log_steps log_interval
checkpoint.every: save_steps save_strategy save_interval checkpoint_every
checkpoint.keep: save_total_limit
checkpoint.best: load_best_model_at_end
best.metric: metric_for_best_model
early_stop.patience: early_stopping_patience patience
optim.lr: learning_rate lr max_lr peak_lr
optim.weight_decay: weight_decay wd
optim.warmup_steps: warmup_steps num_warmup_steps
optim.warmup_fraction: warmup_ratio warmup
optim.schedule: lr_scheduler_type lr_scheduler scheduler
optim.max_grad_norm: max_grad_norm grad_clip clip_grad_norm gradient_clip_val
optim.betas: adam_beta1 adam_beta2 beta1 beta2
optim.eps: adam_epsilon epsilon
optim: optimizer optimiser
model.pretrained: init_from model_name_or_path model_name pretrained_model_name_or_path model_id base_model
model.tokenizer: tokenizer_name tokenizer_name_or_path
model.hidden_dropout: dropout hidden_dropout_prob
model.num_layers: num_hidden_layers n_layers n_layer
model.num_heads: num_attention_heads n_heads n_head
backend.precision: fp16 bf16 fp16_full_eval bf16_full_eval tf32 mixed_precision precision dtype
backend.compile: torch_compile
backend.activation_checkpointing: gradient_checkpointing
backend.device: device use_cpu no_cuda
parallel: fsdp deepspeed strategy
data.path: dataset_name dataset data_dir dataset_path dataset_config
data.train: train_file train_data train_path
data.validation: validation_file eval_file valid_file dev_file validation_data
data.columns.text: text_column text_column_name
data.columns.label: label_column label_column_name
data.num_workers: dataloader_num_workers num_workers workers preprocessing_num_workers
data.max_train_examples: max_train_samples
eval_examples: max_eval_samples
task.mask_rate: mlm_probability
task.label_smoothing: label_smoothing_factor label_smoothing
hub.push_to: push_to_hub hub_model_id hub_repo
telemetry.trackers: report_to tracker logger
corpus.path: train_file data_dir input input_file
tokenizer.pretrained: tokenizer_name tokenizer_name_or_path model_name_or_path
"""


def opened(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate the overrides for Hydra from the values with names, which Hydra may reject: {-1: neg}, [don't]."""
    for_hydra: list[str] = []
    users_own: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key in TABLES:
            users_own[key] = {**users_own.get(key, {}), **own_table(key, text)}
        elif key == LABELS:
            users_own[key] = own_list(key, text)
        else:
            for_hydra.append(f"{key}={quoted(text)}" if text.startswith("~") else override)
    return for_hydra, users_own


def ours(name: str, keys: Collection[str]) -> str | None:
    """Return our setting, one of `keys` or inside one, that has this name elsewhere; None if there is none."""
    for line in ELSEWHERE.strip().splitlines():
        key, _, names = line.partition(": ")
        if name in names.split() and (key in keys or key.rpartition(".")[0] in keys):
            return key
    return None


def close_to(name: str, keys: Collection[str]) -> str:
    """Return a hint for an unknown name: our key, or the one with the closest last word, first in the same section."""
    section, _, word = name.rpartition(".")
    words = {key.rpartition(".")[2]: key for key in keys}
    words |= {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if word in keys:
        meant = None
    else:
        meant = ours(word.lower(), keys)
    if meant is None:
        close = difflib.get_close_matches(word, list(words), n=1)
        if not close:
            return "--cfg job lists all"
        meant = words[close[0]]
    return f"did you mean {meant}?"


def quoted(text: str) -> str:
    """Quote the value of an override, so that Hydra reads all of it as text except references (${...})."""
    # imported here: --help needs no Hydra
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()


def as_typed(value: Any) -> str:
    """Return a value as it is typed after key=."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, dict):
        entries = [f"{as_typed(name)}: {as_typed(each)}" for name, each in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return quoted(value)
    return str(value)


def own_table(key: str, text: str) -> dict[str, str | None]:
    """Parse a table of names, each taken literally, as YAML, whose plain scalars allow more characters than Hydra's."""
    value = as_written(text)
    names = list(value.values()) if isinstance(value, dict) else [None]
    ok = all(isinstance(name, str) and name for name in names)
    check(ok, f"{key}={text}: {key} must be a table, such as {{a: b, c: d}}")
    return {name: None if to == "null" else to for name, to in value.items()}


def own_list(key: str, text: str) -> list[str]:
    """Parse a list of names, each taken literally: [no, null, 1e3] contains these three words."""
    value = as_written(text)
    ok = isinstance(value, list) and all(isinstance(name, str) for name in value)
    check(ok, f"{key}={text}: {key} must be a list, such as [a, b]")
    return value


def as_written(text: str) -> Any:
    """Parse YAML with every scalar as text. Returns None if the YAML is invalid."""
    try:
        return yaml.BaseLoader(text).get_single_data()
    except yaml.YAMLError:
        return None
