"""What an account may run at once, against what a plan needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from launch.ec2.api import Api
from launch.ec2.resolve import type_info
from train.config import InputError, check

NAMES = {
    "on-demand": re.compile(r"Running On-Demand (.+) instances"),
    "spot": re.compile(r"All (.+) Spot Instance Requests"),
}


@dataclass(frozen=True)
class Quota:
    region: str
    name: str
    code: str
    vcpus: float
    needed: int

    @property
    def is_enough(self) -> bool:
        return self.vcpus >= self.needed

    def __str__(self) -> str:
        line = f"{self.region}: {self.name} ({self.code}): {self.vcpus:,.0f} vCPUs, {self.needed:,} are needed"
        if self.is_enough:
            return f"{line}; others' use counts too"
        return (
            f"{line}: too few; aws service-quotas request-service-quota-increase --service-code ec2 "
            f"--quota-code {self.code} --desired-value {self.needed} --region {self.region} (takes hours to days)"
        )


def family_of(instance: str) -> str:
    """trn1 of trn1.32xlarge, p5 of p5en.48xlarge: letters and generation."""
    match = re.match(r"[a-z]+\d+", instance)
    check(match is not None, f"{instance} is no type of EC2, as trn1.32xlarge")
    assert match is not None
    return match[0]


def covers(families: str, family: str) -> int:
    """How well the text of a quota ("P4, P3 and P2", "Standard (A, C, ...)") names a family: 0 not, 2 exactly."""
    words = {word.lower() for word in re.findall(r"[A-Za-z]+\d*", families)} - {"and", "standard"}
    return 2 if family in words else 1 if family.rstrip("0123456789") in words else 0


def quota_of(api: Api, region: str, instance: str, machines: int, market: str) -> Quota:
    """The quota that counts for machines of a type. InputError if the region lacks the type, or shows no quota."""
    info, pattern = type_info(api, region, instance), NAMES[market]
    check(info is not None, f"{region} has no {instance}: choose another region (--regions)")
    assert info is not None
    listed = api.pages(region, "list_service_quotas", "Quotas", service="service-quotas", ServiceCode="ec2")
    named = [(match[1], each) for each in listed if (match := pattern.fullmatch(str(each["QuotaName"])))]
    best = max(named, key=lambda pair: covers(pair[0], family_of(instance)), default=None)
    check(
        best is not None and covers(best[0], family_of(instance)) > 0,
        f"Service Quotas of {region} shows no {market} quota for {instance}; look in the console",
    )
    assert best is not None
    needed = machines * int(info["VCpuInfo"]["DefaultVCpus"])
    return Quota(region, str(best[1]["QuotaName"]), str(best[1]["QuotaCode"]), float(best[1]["Value"]), needed)


def check_quotas(api: Api, regions: Iterable[str], instance: str, machines: int, market: str) -> None:
    """InputError if the account may run so few machines in every region. A quota that AWS does not show, or that this
    user may not read, refuses nothing: EC2 itself does so later.
    """
    known, regions = list[Quota](), list(regions)
    for region in regions if market in NAMES else ():
        with suppress(InputError):
            known.append(quota_of(api, region, instance, machines, market))
    check(not known or len(known) < len(regions) or any(each.is_enough for each in known), "; ".join(map(str, known)))


def quotas(api: Api, regions: Iterable[str], instance: str, machines: int, market: str) -> list[Quota]:
    return [quota_of(api, region, instance, machines, market) for region in regions]
