"""Machines for a run, all or none, in one subnet: the first of the list that has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from launch.ec2 import groups
from launch.ec2.api import REGION, Api, NoCapacity, Refused
from launch.ec2.config import Ec2Config
from launch.ec2.intents import PLACEMENT, RUN, SECURITY, Intent, Intents
from launch.ec2.machines import Machine
from launch.ec2.request import body, has_placement_group, name_of, tag_specifications, tags
from launch.ec2.resolved import Resolved, Site
from launch.job import Job
from launch.record import Record
from train.storage.folders import sha256_json
from train.storage.untrusted import FileName, Sha256

REPLAY_S = 600.0  # after which a request whose answer nobody heard is not repeated: its machines would be visible


@dataclass
class Gang:
    """Asks EC2 for a run's machines. Every call that makes something is in the record before it is made."""

    record: Record
    job: Job
    cluster: Ec2Config
    resolved: Resolved
    api: Api
    user_data: bytes
    intents: Intents
    checked: set[str] = field(default_factory=set)  # security groups whose rules have been read

    @property
    def size(self) -> int:
        return self.job.nodes + self.job.spares

    def request(self, wanted: Sequence[tuple[Site, int]]) -> list[str]:
        """Ask in one subnet after another, each for its number; the ids of the machines. NoCapacity if none has them:
        the error of each is in its message.
        """
        errors: dict[str, NoCapacity] = {}
        without: set[str] = set()  # regions that have nothing for this account
        for site, count in wanted:
            if site.region in without:
                continue
            try:
                return self.request_in(site, count)
            except NoCapacity as error:
                errors[site.subnet] = error
                without |= {site.region} if error.scope == REGION else set()
        last = list(errors.values())[-1]
        seen = "; ".join(f"{subnet}: {error.code}" for subnet, error in errors.items())
        raise NoCapacity(f"no {self.job.instance} in any subnet ({seen}). {last}", last.code)

    def request_in(self, site: Site, count: int) -> list[str]:
        group, placement = self.security_group(site), self.placement_group(site)
        number = self.intents.next
        intent = self.begin(RUN, site.region, site.subnet, count, self.digest(site, count, number, group, placement))
        return self.send(intent, site, group, placement)

    def send(self, intent: Intent, site: Site, group: str, placement: str | None) -> list[str]:
        request = self.body(site, intent.count, intent.number, group, placement)
        try:
            answer = groups.as_soon_as_known(lambda: self.api.ask(site.region, RUN, **request))
        except Refused as error:
            self.intents.end(intent, error=error.code)
            raise
        made = [str(each["InstanceId"]) for each in answer["Instances"]]
        self.intents.end(intent, instances=made)
        return made

    def settle(self, seen: Sequence[Machine], *, now_unix_s: float) -> None:
        """Answer the open requests of a watcher before this one: by the machines that EC2 shows, or by repeating the
        same request with the same token, which makes nothing twice.
        """
        for intent in self.intents.open(RUN, self.resolved.id):
            site = next((each for each in self.resolved.sites if each.subnet == intent.target), None)
            made = [each.id for each in seen if each.intent == intent.number]
            if made or site is None or now_unix_s - intent.time_unix_s > REPLAY_S:
                self.intents.end(intent, instances=made, error="" if made else "Unanswered")
                continue
            group, placement = self.security_group(site), self.placement_group(site)
            if self.digest(site, intent.count, intent.number, group, placement) != intent.sha256:
                self.intents.end(intent, error="Unanswered")  # of another version of this program
                continue
            with suppress(NoCapacity):  # it is in the answer; the next request goes elsewhere
                self.send(intent, site, group, placement)

    def body(self, site: Site, count: int, number: int, group: str | None, placement: str | None) -> dict[str, Any]:
        return body(
            self.job,
            self.cluster,
            self.resolved,
            site,
            count=count,
            number=number,
            record=self.record,
            user_data=self.user_data,
            group=group,
            placement=placement,
        )

    def digest(self, site: Site, count: int, number: int, group: str, placement: str | None) -> str:
        return sha256_json(self.body(site, count, number, group, placement))

    def begin(self, operation: str, region: str, target: str, count: int, digest: str) -> Intent:
        now_unix_s = round(time.time(), 3)
        intent = Intent(
            self.intents.next, operation, region, target, count, self.resolved.id, Sha256(digest), now_unix_s
        )
        return self.intents.begin(intent)

    def security_group(self, site: Site) -> str:
        """The group of the run in the VPC of a site, made if it is absent, and checked; or the one that was given."""
        if self.cluster.security_group is not None:
            return self.cluster.security_group  # launch.ec2.resolve has checked it
        name = name_of(self.record)
        there = groups.find_security_group(self.api, site.region, name, site.vpc)
        if there is None:
            intent = self.begin(SECURITY, site.region, site.vpc, 0, sha256_json([name, site.vpc]))
            specifications = tag_specifications(tags(self.record, intent.number), "security-group")
            groups.make_security_group(self.api, site.region, name, site.vpc, specifications)
            self.intents.end(intent)
            there = groups.as_soon_as_known(lambda: self.made(site, name))
        ident = str(there["GroupId"])
        if ident not in self.checked:
            groups.allow_itself(self.api, site.region, ident)
            self.checked.add(ident)
        return ident

    def made(self, site: Site, name: str) -> dict[str, Any]:
        there = groups.find_security_group(self.api, site.region, name, site.vpc)
        if there is None:
            raise Refused(
                f"{site.region} does not show the security group {name} that it made", "InvalidGroup.NotFound"
            )
        return dict(there)

    def placement_group(self, site: Site) -> str | None:
        """The group of the run in a subnet, made if it is absent: a cluster is in one zone."""
        if not has_placement_group(self.cluster, self.size):
            return None
        name = f"{name_of(self.record)}-{site.subnet}"
        filters = [{"Name": "group-name", "Values": [name]}]
        if not groups.find_placement_groups(self.api, site.region, filters):
            intent = self.begin(PLACEMENT, site.region, name, 0, sha256_json([name]))
            specifications = tag_specifications(tags(self.record, intent.number), "placement-group")
            groups.make_placement_group(self.api, site.region, FileName(name), specifications)
            self.intents.end(intent)
        return name
