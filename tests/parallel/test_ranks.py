"""What ranks agree on: sums, actions of one rank, failures that all raise."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from forks import launch, run_forked
from rejections import rejects

from train.config import Failure, InputError
from train.parallel.ranks import World
from train.run.stopping import StopRequest, Votes

ONE = World()


def test_a_single_process_agrees_with_itself():
    assert (ONE.rank, ONE.size, ONE.num_machines) == (0, 1, 1)
    assert ONE.sum([1, True, 2.5]) == [1.0, 1.0, 2.5]
    assert ONE.all_gather_object("a") == ONE.gather("a") == ["a"]
    assert ONE.agree(lambda: 3) == ONE.run_on_rank0(lambda: 3) == 3
    rejects("no such file", ONE.agree, reject)


def reject():
    raise InputError("no such file")


def test_a_long_action_is_waited_for_with_a_heartbeat():
    beaten = threading.Event()
    assert ONE.run_on_rank0(lambda: beaten.wait(60), beaten.set)


def test_a_machine_full_of_ranks_loads_eight_at_a_time():
    class Rank(World):
        def __init__(self, local_rank):
            self.local_rank, self.local_size, self.barriers = local_rank, 20, 0

        def barrier(self):
            self.barriers += 1

    entered = {}
    for local_rank in range(20):
        rank = Rank(local_rank)
        with rank.stagger_local_ranks():
            entered.setdefault(rank.barriers, []).append(local_rank)
        assert rank.barriers == 3  # the same number on all ranks
    assert [len(ranks) for _, ranks in sorted(entered.items())] == [8, 8, 4]


def message(call, *arguments):
    try:
        call(*arguments)
    except (InputError, Failure) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rank_of_three(folder):
    dist.init_process_group("gloo")
    world, heartbeats = World(), []
    rank = world.rank

    def fails_on(number, error):
        if rank == number:
            raise error

    answer = {"sum": world.sum([1.0, rank]), "gathered": world.all_gather_object(rank * 2)}
    # a lock cannot be sent
    answer["broadcast"] = world.broadcast(5 if rank == 0 else threading.Lock())
    answer["gather"] = [float(each) for each in world.gather(torch.arange(rank * 1000).sum())]
    answer["agree"] = message(world.agree, lambda: fails_on(2, InputError("rank 2 has no file")))
    answer["first"] = world.run_on_rank0(lambda: f"by {rank}", lambda: heartbeats.append(1))

    answer["first fails"] = message(
        world.run_on_rank0, lambda: fails_on(0, Failure("the disk is full"))
    )
    answer["others are not asked"] = message(
        world.run_on_rank0, lambda: fails_on(1, Failure("never raised"))
    )
    machine = Path(folder) / f"machine_{rank}"
    world.run_on_local_rank0(machine.touch)

    votes = Votes(world, StopRequest())
    votes.cast(InputError("rank 1 cannot draw") if rank == 1 else None)
    votes.count()
    answer["counted"] = [votes.stops, votes.failures]
    answer["vote"] = message(votes.raise_failure)
    if rank == 2:
        votes.stop.reason = "SIGTERM"
    votes.cast(None)
    votes.count()
    answer["stops"] = [votes.stops, votes.failures]
    answer["reasons"] = [[number, reason] for number, reason, *_ in votes.reasons()]
    answer["none"] = message(votes.raise_failure)
    try:
        world.agree(lambda: fails_on(1, KeyError("a bug")))
    except (KeyError, RuntimeError) as error:
        answer["bug"] = f"{type(error).__name__}: {error}"
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


def test_three_ranks_agree(tmp_path):
    done = run_forked(launch(__file__, [str(tmp_path)], ranks=3), os.environ)
    assert done.returncode == 0, done.stderr
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [answer.pop("gather") for answer in answers] == [[0.0, 499500.0, 1999000.0], [], []]
    bugs = [answer.pop("bug") for answer in answers]
    others = "RuntimeError: rank 1: KeyError: 'a bug'"
    assert bugs == [others, "KeyError: 'a bug'", others]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == {
        "sum": [3.0, 3.0],
        "gathered": [0, 2, 4],
        "broadcast": 5,
        "first": "by 0",
        "agree": "InputError: rank 2 has no file",
        "first fails": "Failure: the disk is full",
        "others are not asked": "",
        "counted": [0.0, 1.0],
        "vote": "InputError: rank 1 cannot draw",
        "stops": [1.0, 0.0],
        "reasons": [[2, "SIGTERM"]],
        "none": "",
    }
    assert [path.name for path in tmp_path.glob("machine_*")] == ["machine_0"]


if __name__ == "__main__":
    import sys

    rank_of_three(sys.argv[1])
