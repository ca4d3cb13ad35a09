"""Runs over several machines: restarts after which the ranks join again, and rejections that all learn of."""

from __future__ import annotations

import json
import re
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from running import eventually, lines, run, train_overrides

from train.run_folder.metrics_files import rows

HANG_S = 400.0  # never waited for unless a test fails
# A rank that is killed or hangs in its first attempt, after a checkpoint, and a rank that comes late to every attempt.
DISTURBED = """
import os, signal, sys, time
from pathlib import Path
from train.run.stopping import Votes

rank, mark = os.environ["RANK"], Path(os.environ["MARK"])
if rank == os.environ.get("LATE"):
    time.sleep(2)
before, steps = Votes.cast, []  # the trial of an evaluation casts three

def cast(votes, failure):
    steps.append(failure)
    if rank in (os.environ.get("KILLED"), os.environ.get("HANGS")) and len(steps) == 8 and not mark.exists():
        mark.touch()
        time.sleep(600 if "HANGS" in os.environ else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    before(votes, failure)

Votes.cast = cast
from train.__main__ import main
sys.exit(main())
"""


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run_dir, "train")}


@pytest.mark.parametrize(
    ("given", "rendezvous", "killed", "late"),
    [
        ("", "static", 1, 0),
        ("backend=xla", "c10d", 0, 1),
        ("parallel=pipeline parallel.stages=2 parallel.micro_batches=2", "static", 1, 0),
        ("parallel=fsdp", "static", 0, 1),
    ],
)
def test_ranks_of_two_machines_meet_again_after_one_was_killed(
    machines, prepared, tmp_path, given: str, rendezvous: str, killed: int, late: int
):
    arguments = given.split()
    whole = run(train_overrides(tmp_path / "whole", prepared, *arguments), ranks=2)
    assert whole.returncode == 0, whole.stderr
    script, mark, log = tmp_path / "script.py", tmp_path / "mark", tmp_path / "log"
    script.write_text(DISTURBED)
    agents = machines.torchrun(
        script,
        train_overrides(tmp_path / "run", prepared, *arguments),
        env={"KILLED": str(killed), "LATE": str(late), "MARK": str(mark)},
        log=log,
        rendezvous=rendezvous,
        restarts=1
        if rendezvous == "static"
        else 3,  # c10d may need one more for the agents to agree
    )
    codes = ended(agents)
    assert codes == [0, 0] and mark.exists(), (
        log.with_suffix(".0").read_text() + log.with_suffix(".1").read_text()
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


JOINS = """
import os, socket
from train.parallel.rendezvous import join
from train.machine import rank_setup
from train.machine.launched import launched
from train.parallel.ranks import World

cards = [rank_setup.network_card(host) for host in (os.environ["MASTER_ADDR"], socket.gethostname(), "10.88.0.9")]
rank_setup.prepare(launched(), forks=False)
join("gloo", timeout_s=60, join_timeout_s=60)
print("cards", *cards, "sum", *World().sum([1.0]), flush=True)
"""


def test_ranks_connect_by_the_card_that_leads_to_the_master(machines, tmp_path):
    """The host name leads to 127.0.1.1, where gloo would wait for the other machine."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(JOINS)
    codes = ended(machines.torchrun(script, [], env={}, log=log))
    said = [log.with_suffix(f".{number}").read_text() for number in (0, 1)]
    assert codes == [0, 0], said
    assert all("cards eth0 eth0 aside sum 2.0" in text for text in said), said


def test_after_a_machine_died_the_run_goes_on_with_one_less(machines, bucket, prepared, tmp_path):
    """The run folder is in S3. The dead machine closes no connection, so the others are ended by their watchdogs."""
    # once, at the end: the first evaluation has the time of a start
    same = [
        "global_batch_size=12",
        "eval_every=6",
    ]
    assert run(train_overrides(tmp_path / "whole", prepared, *same), ranks=3).returncode == 0
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(DISTURBED)
    with machines.reaching(bucket.service.server.port) as address:
        arguments = train_overrides(bucket.location("run"), prepared, *same, *bucket.overrides())
        arguments += [f"s3.endpoint=http://{address}", "lease.ttl_s=2", "watchdog.step_s=4"]
        env = {"HANGS": "2", "MARK": str(mark), "NO_PROXY": "*", "no_proxy": "*"}
        agents = machines.torchrun(script, arguments, env=env, log=tmp_path / "three", count=3)
        eventually(lambda: mark.exists() or not agents[0].is_alive())
        assert mark.exists(), (tmp_path / "three.0").read_text()
        with machines.dead(2):
            assert ended(agents)[:2] == [1, 1]
            outcome = json.loads(bucket.get("run/outcome.json"))
            assert re.match("stuck: rank [01] has been in ", outcome["reason"]), outcome
            assert "perhaps for a rank of another machine" in outcome["reason"]
            rest = machines.torchrun(script, arguments, env=env, log=tmp_path / "two")
            assert ended(rest) == [0, 0], (tmp_path / "two.0").read_text()
    (tmp_path / "run").mkdir()
    kept = rows(bucket.folder())
    (tmp_path / "run/metrics.jsonl").write_bytes(b"".join(row + b"\n" for row in kept))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def ended(agents: list[ForkServerProcess]) -> list[int | None]:
    """Exit codes."""
    try:
        eventually(lambda: not any(agent.is_alive() for agent in agents), HANG_S)
    finally:
        for agent in agents:
            agent.kill()
            agent.join()
    return [agent.exitcode for agent in agents]
