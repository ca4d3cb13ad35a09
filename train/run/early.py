"""Checks of a run that need no torch, whose import takes seconds: paths, columns and batch sizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from train.config import RecordsConfig, TrainConfig, check
from train.config.data import is_named
from train.config.plan import make_plan
from train.storage.folders import is_s3, local_path, scratch_folder
from train.storage.hub_access import check_model, is_at_hub
from train.tasks import spec_of

MANY_ROWS = 2**62  # the number of rows is not known yet


def check_early(cfg: TrainConfig, world_size: int) -> None:
    """Check batch sizes, local files and columns. Raises InputError; what S3 and the Hub hold is checked later."""
    make_plan(cfg, world_size=world_size, rows=MANY_ROWS, seq_len=cfg.seq_len)
    for key in ("pretrained", "tokenizer"):
        location = getattr(cfg.model, key)
        if location is not None:
            check_model(f"model.{key}", location)
    check_data(cfg)


def check_data(cfg: TrainConfig) -> None:
    """Check that local files exist, and that rows have the columns that the task reads. Raises InputError."""
    if is_s3(cfg.data.path) or is_own(cfg):
        return
    if isinstance(cfg.data, RecordsConfig):
        check_rows(cfg, cfg.data)
    else:
        from train.data.shards.manifest import read_manifest

        read_manifest(local_path(cfg.data.path))


def is_own(cfg: TrainConfig) -> bool:
    """Return whether the task is the user's own, which may read its data in other ways."""
    return not spec_of(cfg.task).module.startswith("train.tasks.")


def check_new_rows(cfg: TrainConfig, named: Collection[str]) -> None:
    """Check the file of new rows, which may lack the target unless its key is in `named`. Raises InputError."""
    from train.data.records.sources import of_new_rows

    assert isinstance(cfg.data, RecordsConfig)
    if not is_s3(cfg.data.path) and not is_own(cfg):
        optional = {spec_of(cfg.task).target} - set(named)
        check_rows(cfg, of_new_rows(cfg.data, cfg.data.path), optional)


def check_rows(cfg: TrainConfig, data: RecordsConfig, optional: Collection[str] = ()) -> None:
    """Check that the files of rows exist, and that their first rows have the columns that the task reads.

    The columns of the `optional` keys may be missing.
    """
    check_exists(data.path)
    if not local_path(data.path).exists():
        return  # it is a Hub id
    from train.data.records.examples import with_columns
    from train.data.records.sources import layout, open_source

    if layout(data, cfg.s3) != "files":
        return
    spec = spec_of(cfg.task)
    keys = [key for key in (*spec.inputs, spec.target) if key not in optional]
    with scratch_folder() as scratch:
        for parts in open_source(data, cfg.s3).tables((), scratch).values():
            for table in parts:
                columns = asdict(table.keys or data.columns)
                with_columns({key: columns[key] for key in keys if columns[key]}, table)


def check_exists(location: str) -> None:
    """Raise InputError if a location of rows is a path on this machine where nothing is."""
    is_elsewhere = is_s3(location) or (is_at_hub(location) and not is_named(location))
    check(
        is_elsewhere or local_path(location).exists(),
        f"data.path={location}: there is no such file or folder",
    )
