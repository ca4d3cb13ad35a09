"""The precedence of typed settings over a recipe (experiment=...) that chooses the same thing by another key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from train.config import check, flatten
from train.run.help import option_values

LENGTHS = ("max_steps", "max_examples", "max_epochs")
SIZES = (
    "vocab_size",
    "max_positions",
    "embedding_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
)
OF_NEW_MODEL = tuple(f"model.{name}" for name in (*SIZES, "initializer_range"))
# For each setting that the user may type: other settings that choose the same thing, which a recipe may have set.
REPLACED: dict[str, tuple[str, ...]] = {
    "model.init_from": ("model.pretrained", *OF_NEW_MODEL),
    "model.pretrained": ("model.init_from", *OF_NEW_MODEL),
    "model.architecture": ("model.init_from", "model.pretrained"),
    "optim.warmup_fraction": ("optim.warmup_steps",),
    "data.validation_fraction": ("data.validation",),
    "tokenizer.vocab_size": ("tokenizer.pretrained",),
    "validation_fraction": ("corpus.validation",),
    **{key: tuple(other for other in LENGTHS if other != key) for key in LENGTHS},
}
TOGETHER = {*LENGTHS, *OF_NEW_MODEL}  # may be typed together with the setting that replaces them


def over_recipe(given: Mapping[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """Return further settings that follow from the given ones and replace those of a recipe.

    The values of a given option replace the recipe's, and a given setting resets those that REPLACED lists for it.
    Raises InputError if two given settings choose the same thing.
    """
    typed = {key: value for key, value in given.items() if value is not None}
    chosen: dict[str, Any] = {}
    for key, option in typed.items():
        # A group's value may also be a table of settings, which is empty here.
        if key in groups and key != "experiment" and isinstance(option, str):
            chosen |= flatten(option_values(key, option), f"{key}.")
    values: dict[str, Any] = {}
    if "experiment" in typed:
        values = {key: value for key, value in chosen.items() if key not in given}
    # A section may be given as a whole: corpus.validation={path: user/set}
    known = {*typed, *(key.rpartition(".")[0] for key in typed)}
    for key, others in REPLACED.items():
        for other in others:
            are_both = key in typed and other in known and other not in TOGETHER
            check(not are_both, f"{key} and {other} choose the same thing; leave one of them out")
            is_replaced = key in typed or key in chosen
            if is_replaced and other not in typed and other not in chosen:
                values[other] = None
    return values
