"""What labelled data is: a fingerprint of all that is read, and a glance at its files, which tells if they changed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.config import RecordsConfig, S3Config
from train.data.documents import naming
from train.data.raw_files import S3File, format_of, layout, saved_folder, saved_places, split_files, split_places
from train.data.raw_formats import hub_version
from train.storage import is_s3, local_path, scratch_folder, sha256_file, sha256_json

VERSION = 2  # of how rows are read: another one makes other fingerprints
# Settings that leave the rows as they are; of the format, what it comes to counts.
NOT_READING = ("path", "num_workers", "prefetch", "verify", "cache_dir", "lengths", "save_to", "max_bad_rows", "format")
NAMING_FILES = ("train", "validation", "more_validation", "name", "revision")  # whose content counts instead


def fingerprint(cfg: RecordsConfig, s3: S3Config, scratch: Path | None = None) -> str:
    """sha256 of all that is read and of the settings that matter to reading it; for the Hub, of the data's commit.

    Files in S3 are fetched for it, to `scratch` if that is given, where `read_raw` finds them again.
    """
    if scratch is None:
        with scratch_folder() as folder:
            return fingerprint(cfg, s3, folder)
    settings = reading_settings(cfg)
    kind = layout(cfg, s3)
    content: Any
    if kind == "files":
        settings = {name: value for name, value in settings.items() if name not in NAMING_FILES}
        files = split_files(cfg, s3, scratch)
        content = {
            split: [[format_of(path, cfg), ending(path), digest_of(path)] for path in paths]
            for split, paths in files.items()
        }
    elif kind == "saved" or is_folder(cfg):
        root = saved_folder(cfg, s3, scratch)
        found = sorted(path for path in root.rglob("*") if path.is_file())
        content = [[path.relative_to(root).as_posix(), digest_of(path)] for path in found]
    else:
        content = [cfg.path, hub_version(cfg, scratch)]
    return sha256_json([VERSION, kind, content, settings])


def reading_settings(cfg: RecordsConfig) -> dict[str, Any]:
    return {key: value for key, value in asdict(cfg).items() if key not in NOT_READING}


def ending(path: Path) -> str:
    """What a name tells of how a file is read: .tsv has tabs, .gz is packed."""
    name = path.name.lower()
    plain = name.removesuffix(".gz")
    return Path(plain).suffix + name[len(plain) :]


def digest_of(path: Path) -> str:
    with naming(f"{path} cannot be read", (OSError,)):
        return sha256_file(path)


def is_folder(cfg: RecordsConfig) -> bool:
    return not is_s3(cfg.path) and local_path(cfg.path).is_dir()


# ---- without reading -----------------------------------------------------------------------------------------------


def glance(cfg: RecordsConfig, s3: S3Config) -> str | None:
    """A sha256 that changes when the files or the settings do, without reading one: of names, sizes and times, in S3
    of ETags. None for data of the Hub, whose version `fingerprint` finds without reading. InputError as there."""
    kind = layout(cfg, s3)
    if kind == "files":
        places = split_places(cfg, s3)
    elif kind == "saved" or is_folder(cfg):
        places = {"": saved_places(cfg, s3)}
    else:
        return None
    seen = {split: [stamp(place) for place in found] for split, found in places.items()}
    return sha256_json([VERSION, kind, cfg.format, reading_settings(cfg), seen])


def stamp(place: Path | S3File) -> list[Any]:
    if isinstance(place, S3File):
        head = place.head()
        return [str(place), place.folder.endpoint, head["ContentLength"], head["ETag"]]
    with naming(f"{place} cannot be read", (OSError,)):
        found = place.stat()
    # The last is of changes to the file in whatever way: a copy that keeps the time of its original has its own.
    return [str(place.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def place_key(cfg: RecordsConfig) -> str:
    """A sha256 of data.path and the settings alone."""
    where = cfg.path if is_s3(cfg.path) else str(local_path(cfg.path).absolute())
    return sha256_json([VERSION, where, cfg.format, reading_settings(cfg)])


def is_missing(cfg: RecordsConfig) -> bool:
    """Whether nothing is at data.path of this machine. The Hub and S3 say so themselves."""
    return "://" not in cfg.path.removeprefix("file://") and not local_path(cfg.path).exists()
