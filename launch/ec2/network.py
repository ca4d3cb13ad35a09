"""Network interfaces of a machine, one for each of its network cards, from what EC2 says of its type. Pure functions.

The list of the cards is EC2's own answer (DescribeInstanceTypes) and never a constant: types differ in the number of
cards, in what the first one can do, and in how many interfaces a card has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train.config import check

INTERFACE, EFA, EFA_ONLY = "interface", "efa", "efa-only"  # efa-only carries no IP address


@dataclass(frozen=True)
class Interface:
    card: int
    device: int  # its index on the card
    type: str  # interface | efa | efa-only

    @property
    def has_address(self) -> bool:
        return self.type != EFA_ONLY


def interfaces(network: Mapping[str, Any], *, uses_efa: bool, secondary: str) -> list[Interface]:
    """The interfaces of a machine whose NetworkInfo this is; `secondary`: the type on cards beyond the first.

    The rule for the device's index is ParallelCluster's: 0 on a card that takes one interface, 1 on others. An
    efa-only interface cannot be a machine's first.
    """
    cards = sorted(network.get("NetworkCards", ()), key=lambda card: int(card["NetworkCardIndex"]))
    most = int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)) if uses_efa else 0
    first = cards[0] if cards else {"NetworkCardIndex": 0}
    made = [Interface(int(first["NetworkCardIndex"]), 0, EFA if most and EFA in types(first) else INTERFACE)]
    able = [card for card in cards if EFA in types(card)]
    for card in cards[1:]:
        if card in able and sum(each.type != INTERFACE for each in made) < most:
            kind = secondary if secondary in types(card) else EFA
            device = 0 if int(card["MaximumNetworkInterfaces"]) == 1 else 1
            made.append(Interface(int(card["NetworkCardIndex"]), device, kind))
    assert sum(each.type != INTERFACE for each in made) == min(most, len(able))
    return made


def types(card: Mapping[str, Any]) -> list[str]:
    return list(card.get("InterfaceTypes", ()))


def specifications(
    chosen: list[Interface], *, subnet: str, group: str | None, public_address: bool
) -> list[dict[str, Any]]:
    """The same as RunInstances takes it. InputError for a public address that EC2 gives to no such machine."""
    check(
        not (public_address and len(chosen) > 1),
        f"cluster.public_address=true is for machines with one network interface, these have {len(chosen)}: leave it "
        "out, and reach them through SSM (aws ssm start-session --target i-...)",
    )
    # EC2 refuses the field for several interfaces; for one it would otherwise follow the subnet's default.
    address = {"AssociatePublicIpAddress": public_address} if len(chosen) == 1 else {}
    return [
        {
            "NetworkCardIndex": each.card,
            "DeviceIndex": each.device,
            "InterfaceType": each.type,
            "SubnetId": subnet,
            "DeleteOnTermination": True,
            **({} if group is None else {"Groups": [group]}),
            **address,
        }
        for each in chosen
    ]


def shown(chosen: list[Interface]) -> list[str]:
    """The interfaces as a table, equal neighbours in one line."""
    lines: list[tuple[Interface, Interface]] = []
    for each in chosen:
        if lines and (lines[-1][1].device, lines[-1][1].type, lines[-1][1].card) == (
            each.device,
            each.type,
            each.card - 1,
        ):
            lines[-1] = (lines[-1][0], each)
        else:
            lines.append((each, each))
    return [
        f"card {begin.card}{f' to {end.card}' if end != begin else ''}: device {begin.device}, {begin.type}"
        for begin, end in lines
    ]
