"""What the settings of a job come to in an account: subnets, images, network interfaces. Kept in the record."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from launch.ec2.network import Interface
from launch.record import Record
from train.config import InputError
from train.storage.folders import canonical_json
from train.storage.schema import BadContent, FileName, read_object, record

RESOLVED = "ec2/resolved.json"


@dataclass(frozen=True)
class Site:
    """A subnet in which all machines of the run can be."""

    region: str
    subnet: FileName
    zone: str
    vpc: FileName


@dataclass(frozen=True)
class Image:
    id: FileName
    root_device: str
    name: str


@dataclass(frozen=True)
class Resolved:
    id: FileName  # of this submission: no two of them have a client token in common
    job_id: FileName
    image_setting: str  # cluster.image, from which the images follow
    sites: list[Site]  # in the order in which they are tried
    images: dict[str, Image]  # by region
    interfaces: list[Interface]

    @property
    def regions(self) -> list[str]:
        return list(dict.fromkeys(site.region for site in self.sites))

    def write(self, run: Record) -> None:
        run.folder.write(RESOLVED, canonical_json(asdict(self)))


def read_resolved(run: Record) -> Resolved | None:
    """What the last submission came to; None if there was none. InputError for a file that is damaged."""
    try:
        return record(Resolved, read_object(run.folder.read(RESOLVED)))
    except FileNotFoundError:
        return None
    except BadContent as error:
        raise InputError(f"{run.location}/{RESOLVED} cannot be read: {error}") from error
