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
    "model.pretrained": OF_NEW_MODEL,
    "model.architecture": ("model.pretrained",),
    "optim.warmup_fraction": ("optim.warmup_steps",),
    "data.validation_fraction": ("data.validation",),
    "tokenizer.vocab_size": ("tokenizer.pretrained",),
    "validation_fraction": ("corpus.validation",),
    **{key: tuple(other for other in LENGTHS if other != key) for key in LENGTHS},
}
# Of a fine-tuning that says neither its length nor its batch, as BERT's authors tried (appendix A.3 of the paper).
EPOCHS = 3
BATCH_SIZE = 32
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
    check_one_choice(typed)
    known = {*typed, *chosen}
    for key, others in REPLACED.items():
        if key in known:
            values |= dict.fromkeys(other for other in others if other not in known)
    return values


def check_one_choice(typed: Collection[str]) -> None:
    """Raise InputError if two typed settings choose the same thing."""
    # A section may be given as a whole: corpus.validation={path: user/set}
    sections = {key.rpartition(".")[0] for key in typed}
    for key, others in REPLACED.items():
        for other in others:
            is_typed = other in typed or other in sections
            are_both = key in typed and is_typed and other not in TOGETHER
            check(not are_both, f"{key} and {other} choose the same thing; leave one of them out")


def options_of_weights(chosen: Collection[str], groups: Collection[str]) -> list[str]:
    """Return the options of a run that begins with weights, in groups in which the user has `chosen` none.

    Sizes and dropouts of the default model are not those of other weights, and its learning rate would destroy them.
    """
    if "experiment" in chosen:  # a recipe chooses these
        return []
    options = {"model": "any", "optim": "finetune"}
    return [
        f"{group}={option}"
        for group, option in options.items()
        if group in groups and group not in chosen
    ]


def of_fine_tuning(composed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the length and the batch size of a run on records that begins with weights, if nobody has chosen them."""
    values: dict[str, Any] = {}
    if "model" not in composed or "columns" not in composed.get("data", ()):
        return values
    if composed["model"]["pretrained"] is None:
        return values
    if all(composed[key] is None for key in LENGTHS):
        values["max_epochs"] = EPOCHS
    if composed["global_batch_size"] is composed["micro_batch_size"] is None:
        values["global_batch_size"] = BATCH_SIZE
    return values
