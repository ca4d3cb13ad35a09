"""The settings that make a run the run that it is: a resume keeps them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from train.config import Plan, TrainConfig, check, to_dict
from train.storage.folders import canonical_json

logger = logging.getLogger("train")


def identity_of(cfg: TrainConfig, plan: Plan, data_id: str, lengths: Sequence[int] | None) -> dict[str, Any]:
    """The settings that must stay the same for a run to resume, as one flat table."""
    plain = to_dict(cfg)
    sections = {f"{name}.{key}": value for name in ("task", "model", "optim") for key, value in plain[name].items()}
    return {
        "data": data_id,
        "seed": cfg.seed,
        "global_batch_size": plan.global_batch_size,
        **sections,
        **({} if lengths is None else {"data.lengths": list(lengths)}),  # the order is by them
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """ "key: old -> new" for each key of two flat tables that differs."""
    now = json.loads(canonical_json(now))
    keys = sorted({**before, **now})
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def check_same_run(before: dict[str, Any], identity: dict[str, Any], *, source: object, force: bool) -> None:
    """InputError with all differences if `before`, read from `source`, is another run's; a warning if forced."""
    known = {key: value for key, value in identity.items() if key in before or value}  # without settings new and off
    changed = differences(before, known)
    if changed and force:
        logger.warning("resume.force=true: resuming another run than %s: %s", source, ", ".join(changed))
        return
    lengths = ",".join(map(str, before.get("data.lengths") or ()))
    is_same = not any(each.startswith("data.lengths: ") for each in changed)
    hint = "" if is_same else f"; data.lengths=[{lengths}] keeps its batches, which other devices would not choose"
    check(
        not changed,
        f"{source} is of another run ({', '.join(changed)}); choose another run_dir, or resume with the new settings "
        f"by resume.force=true{hint}",
    )
