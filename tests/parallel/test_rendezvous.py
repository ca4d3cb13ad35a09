"""How ranks join: who is missing is named, and ranks that train with something else are rejected."""

from __future__ import annotations

import pytest
from forks import free_port
from rejections import rejects

from train.config import Failure, InputError
from train.parallel import rendezvous


class Alike:
    """A World in which rank 2 trains with something else, or not."""

    def __init__(self, other: str) -> None:
        self.other = other

    def all_gather_object(self, own):
        return [own, own, ("host2", own[1].replace("cuda", self.other))]


def be_alone(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """The environment of one rank whose others never come."""
    values = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    values["MASTER_PORT"] = free_port()
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("rank", "said"), [(0, "rank 1, 2 of 3 did not come to"), (2, "rank 0 of 3 did not answer at")]
)
def test_a_rank_that_waits_names_those_that_are_missing_and_gives_up(monkeypatch, log, rank, said):
    be_alone(monkeypatch, rank, 3)
    monkeypatch.setattr(rendezvous, "REPORT_EVERY", 1)
    with pytest.raises(Failure, match=f"^{said} 127.0.0.1:.* within 2 s"):
        rendezvous.join("gloo", timeout_s=90, join_timeout_s=2.0)
    if rank == 0:
        assert log.messages and all(
            text.startswith("waiting for rank 1, 2 of 3") for text in log.messages
        )


def test_ranks_that_train_with_something_else_than_rank_0_are_rejected():
    """One machine whose driver has failed, so that it would train on its CPU."""
    rendezvous.check_alike(Alike("cuda"), "ddp on cuda, bf16")
    said = "rank 2 on host2 trains with ddp on cpu, .*, but rank 0 with ddp on cuda, .*; run baretrain doctor"
    rejects(said, rendezvous.check_alike, Alike("cpu"), "ddp on cuda, bf16", error=InputError)
