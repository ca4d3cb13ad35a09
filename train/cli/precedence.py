"""What the user types wins over a recipe (experiment=...), also where another key chooses the same thing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from train.cli.help import option_values
from train.config import check, flatten

LENGTHS = ("max_steps", "max_examples", "max_epochs")
SIZES = ("vocab_size", "max_positions", "embedding_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
OF_NEW_MODEL = tuple(f"model.{name}" for name in (*SIZES, "initializer_range", "position_init"))
# By a setting that the user types, those that choose the same thing, which a recipe may have set.
REPLACED: dict[str, tuple[str, ...]] = {
    "model.init_from": ("model.pretrained", *OF_NEW_MODEL),
    "model.pretrained": ("model.init_from", *OF_NEW_MODEL),
    "model.architecture": ("model.init_from", "model.pretrained"),
    "optim.warmup_fraction": ("optim.warmup_steps",),
    "data.validation_fraction": ("data.validation",),
    "task.mask_rate": ("task.max_predictions",),
    "tokenizer.vocab_size": ("tokenizer.pretrained",),
    **{key: tuple(other for other in LENGTHS if other != key) for key in LENGTHS},
}
TOGETHER = {*LENGTHS, *OF_NEW_MODEL, "task.max_predictions"}  # given beside the setting that replaces them, both count


def over_recipe(given: Mapping[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """Return the settings that follow from the given ones where a recipe may say otherwise.

    An option of a group wins over the recipe's values, and a setting over those in REPLACED. Raises InputError if two
    are given that choose the same thing.
    """
    typed = {key: value for key, value in given.items() if value is not None}
    chosen: dict[str, Any] = {}
    for group in (key for key in typed if key in groups and key != "experiment"):
        chosen |= flatten(option_values(group, typed[group]), f"{group}.")
    values = {key: value for key, value in chosen.items() if key not in given} if "experiment" in typed else {}
    for key, others in REPLACED.items():
        for other in others if key in typed or key in chosen else ():
            are_both = key in typed and other in typed and other not in TOGETHER
            check(not are_both, f"{key} and {other} choose the same thing; leave one of them out")
            if other not in typed and other not in chosen:
                values[other] = None
    return values
