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
    """The interfaces of a machine whose NetworkInfo this is; `secondary`: the type of EFA on machines of several cards.

    `efa-only` is the layout that the EC2 user guide recommends for several cards (efa-acc-inst-types.html, read in
    November 2026): an ENA interface first, beside it on card 0 an efa-only one at device 1, and one at device 0 of each
    other card. ParallelCluster 3.16 differs in the last (add_network_interfaces of queues_stack.py: device 1 where a
    card takes two), which EC2 takes as well. `efa` is the older layout, an address on each card, of Neuron's guide for
    trn1 (setup-trn1-multi-node-execution) and of ParallelCluster's `EfaInterfaceType: efa`: device 1, so that packets
    leave by card 0. A machine with one card needs one interface, which is both, and can have a public address.
    """
    cards = sorted(network.get("NetworkCards", ()), key=lambda card: int(card["NetworkCardIndex"]))
    most = int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)) if uses_efa else 0
    able = [card for card in cards if EFA in types(card)][:most]
    made = [Interface(0, 0, INTERFACE)]
    for card in able:
        index, room = int(card["NetworkCardIndex"]), int(card["MaximumNetworkInterfaces"])
        is_apart = len(cards) > 1 and secondary == EFA_ONLY and EFA_ONLY in types(card)
        if index == 0 and not (is_apart and room > 1):
            made = [Interface(0, 0, EFA)]
        elif is_apart:
            made.append(Interface(index, 1 if index == 0 else 0, EFA_ONLY))
        else:
            made.append(Interface(index, min(1, room - 1), EFA))
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
