"""Steps of several ranks are recorded by PyTorch's own code, on a CUDA runtime whose kernels do nothing: `fake_cuda`.

Functions that are not tests run in a process of their own for each rank, with that runtime. NCCL needs GPUs: a stand-in
sends nothing, and compares what all ranks ask of it.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_cuda import LAUNCHED, counts
from forks import free_port
from running import train_here

from benchmarks import host_time
from train.config import BackendConfig
from train.parallel import buckets, captured, ddp
from train.parallel.ddp import DDP

GRAPHS = "backend.cuda_graphs"
# The first step builds the buckets, then a shape runs so often before the proof of its graph, which replays it once.
FIRST = 1 + captured.FIRST_CALLS
STEPS = 10
# Launching a graph or a collective takes the host tens of microseconds: with 50 of each, 60 calls are 3 ms.
MOST_CALLS = 60


class Sent:
    def wait(self):
        return True


def stand_in_for_nccl(*, compares):
    """Collectives of device tensors, by kind and size. With `compares`, all ranks must ask for the same one."""
    asked = []

    def ask(kind, tensor, options, collective):
        if not tensor.is_cuda:
            return collective(tensor, **options)
        assert not torch.cuda.is_current_stream_capturing()
        asked.append(f"{kind} {tensor.numel()} {tensor.dtype}")
        if compares:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, asked[-1])
            assert set(every) == {asked[-1]}, every
        return Sent()

    all_reduce, broadcast = dist.all_reduce, dist.broadcast
    dist.all_reduce = lambda tensor, **options: ask("reduce", tensor, options, all_reduce)
    dist.broadcast = lambda tensor, **options: ask("broadcast", tensor, options, broadcast)
    return asked


def fail_in_recordings():
    """Within the backward pass, where a graph ends."""
    cut = captured.Recorder.cut

    def failing(self, action):
        if self.parts:
            torch.cuda.synchronize()
        cut(self, action)

    captured.Recorder.cut = failing


def trains(folder, prepared, *settings):
    # small ones, so that the small model has several
    buckets.FIRST_BYTES, buckets.BUCKET_BYTES = 2**9, 2**12
    ddp.pick_device = lambda *_: torch.device("cuda", 0)
    stand_in_for_nccl(compares=True)
    if os.environ["RANK"] == os.environ.get("FAILING"):
        fail_in_recordings()
    given = ["backend=ddp", f"max_steps={STEPS}", "eval_every=5", "checkpoint.every=5"]
    reason, step = train_here(Path(folder), Path(prepared), *given, *settings)
    return {"reason": reason, "step": step}


def on_ranks(fake_cuda, *words, ranks=2, **env):
    """What each rank answers."""
    common = LAUNCHED | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)} | env
    common["MASTER_PORT"] = str(free_port())

    def run(rank):
        return fake_cuda(*words, **common, RANK=str(rank), LOCAL_RANK=str(rank))

    del common["RANK"], common["LOCAL_RANK"]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, range(ranks)))


def log(folder, rank):
    return (folder / "log" / f"rank_{rank:04d}.txt").read_text()


@pytest.mark.parametrize("micro", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks_record_replay_evaluate_and_save(fake_cuda, prepared, tmp_path, micro):
    folder = tmp_path / "run"
    runs = on_ranks(fake_cuda, trains, folder, prepared, f"micro_batch_size={micro}")
    for rank, run in enumerate(runs):
        assert (run["reason"], run["step"], run["errors"]) == ("done", STEPS, 0)
        assert run["host_copies"] == 0 and run["captures"] == run["ended"]
        assert "replays equal plain steps" in log(folder, rank)
    if micro == 4:
        # the parts of the backward pass, and the update, which is recorded a step earlier
        assert runs[0]["ended"] >= 4
        assert runs[0]["replays"] == runs[0]["ended"] * (STEPS - FIRST) + 1
    assert runs[0]["replays"] == runs[1]["replays"]


def test_a_rank_that_cannot_record_runs_beside_one_that_replays(fake_cuda, prepared, tmp_path):
    folder = tmp_path / "run"
    words = [trains, folder, prepared, "micro_batch_size=4"]
    first, second = on_ranks(fake_cuda, *words, FAILING="1")
    assert first["reason"] == second["reason"] == "done"
    assert first["replays"] > second["replays"] > 0 == first["errors"]
    assert "the last micro batch [4, 32] runs without a CUDA graph: an operation" in log(folder, 1)
    assert "runs without" not in log(folder, 0)


def bert_base():
    """Steps of BERT-base on one rank of two. Returns what the host does in a plain step and in a replayed one."""
    asked = stand_in_for_nccl(compares=False)
    # No proof: it would copy gigabytes.
    captured.Graphs.add = lambda self, *words: (self.try_record(*words), words[1](words[2]))
    backend = DDP(BackendConfig(precision="bf16"))
    backend.world.size = 2
    backend.world.all_gather_object = lambda value: [value, value]
    steps = host_time.Steps(backend)

    def step():
        before, num_sent = counts(), len(asked)
        steps.run()
        after = counts()
        done = {name: after[name] - before[name] for name in after}
        return {**done, "sent": len(asked) - num_sent}

    done = [step() for _ in range(host_time.FIRST + 1)]
    return {"plain": done[1], "replayed": done[-1]}


@pytest.mark.slow
def test_the_host_makes_few_calls_for_a_step_of_bert_base(fake_cuda):
    run = fake_cuda(bert_base)
    plain, step = run["plain"], run["replayed"]
    # 440 MB of gradients in buckets of at least 25 MiB, the count, and a graph after each bucket and for the update
    assert 12 <= step["sent"] == plain["sent"] <= 18 and step["replays"] == step["sent"] + 1
    assert step["captures"] == run["errors"] == 0
    assert step["replays"] + step["sent"] + step["launches"] <= MOST_CALLS
    assert plain["launches"] > 10 * MOST_CALLS
