"""The same global batches, byte for byte, whatever the number of ranks and loader processes."""

import hashlib
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from rejections import rejects
from running import train_config

from train.data.batches import loader
from train.data.batches.loader import Batches, MaskedRows, failure_of
from train.data.batches.masking import IGNORE_INDEX
from train.data.shards.manifest import read_manifest
from train.data.shards.order import PADDING, EvalOrder, ShardSampler
from train.storage import atomic_io
from train.tasks import build_task

G = 16


def rows_of(folder):
    return build_task(train_config(folder / "run", folder)).train_data()


def sampler_of(folder, *, rank, world_size, first_step=0):
    rows = [shard.rows for shard in read_manifest(folder).splits["train"]]
    where = {"rank": rank, "world_size": world_size, "consumed_rows": first_step * G}
    return ShardSampler(rows, seed=7, window_shards=3, global_batch_size=G, **where)


def loader_of(folder, *, rank=0, world_size=1, num_workers=0, first_step=0, **more):
    order = sampler_of(
        folder, rank=rank, world_size=world_size, first_step=first_step
    ).micro_batches(G // world_size)
    settings = {
        "batch_size": G // world_size,
        "prefetch": 2,
        "pin_memory": False,
        "multi_batch": 3,
        **more,
    }
    return Batches(rows_of(folder), order, num_workers=num_workers, **settings)


def global_batches(folder, *, world_size, number, **more):
    """sha256 of each global batch: the ranks' sequences put back where the order had them."""
    per_rank = []
    for rank in range(world_size):
        made = loader_of(folder, rank=rank, world_size=world_size, **more)
        per_rank.append(
            [{k: v.clone() for k, v in batch["inputs"].items()} for batch in islice(made, number)]
        )
    digests = []
    for step in zip(*per_rank, strict=True):
        digest = hashlib.sha256()
        for name in sorted(step[0]):
            digest.update(torch.cat([share[name] for share in step]).numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


@pytest.fixture(scope="module")
def whole(shards):
    """Of one rank without loader processes."""
    digests = global_batches(shards, world_size=1, num_workers=0, number=9)
    assert len(set(digests)) == 9
    return digests


@pytest.mark.parametrize(
    ("world_size", "num_workers", "more"),
    [(1, 1, {}), (2, 3, {}), (8, 0, {}), (2, 0, {"multi_batch": 1}), (2, 0, {"multi_batch": 7})],
)
def test_ranks_and_loader_processes_change_no_byte(shards, whole, world_size, num_workers, more):
    assert (
        global_batches(shards, world_size=world_size, num_workers=num_workers, number=9, **more)
        == whole
    )


def test_what_was_prefetched_is_not_consumed(shards, whole):
    """Killed with batches waiting in loader processes: only steps count."""
    made = iter(loader_of(shards, num_workers=3))
    next(made), next(made)
    del made
    assert (
        global_batches(shards, world_size=4, num_workers=3, number=3, first_step=2) == whole[2:5]
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failure_is_a_batch(shards, num_workers, monkeypatch):
    """The rank reports it to the others instead of leaving them waiting."""

    def drawn(self, items):
        raise OSError(5, "Input/output error", "train-00001.safetensors")

    monkeypatch.setattr(MaskedRows, "draw", drawn)
    (failure,) = loader_of(shards, num_workers=num_workers)
    assert "Input/output error: 'train-00001.safetensors'" in str(failure_of([failure]))


def test_evaluation_draws_each_sequence_once_and_padding_counts_for_nothing(shards):
    """A rank reads shards of its own part alone, for PADDING too, and what the report shows is on rank 0's machine."""
    task = build_task(train_config(shards / "run", shards, "eval_examples=49"))
    data, ends = (
        task.eval_data(),
        np.cumsum([shard.rows for shard in task.manifest.splits["validation"]]),
    )
    gather, read = data.shards.gather, set()

    def noted(rows, names):
        read.update(np.searchsorted(ends, rows, side="right").tolist())
        return gather(rows, names)

    data.shards.gather = noted
    per_rank, labels = [], 0
    for rank in range(3):  # 16, 16 and 17 rows: two ranks have a batch of PADDING alone
        read.clear()
        order = EvalOrder(49, 4, rank, 3)
        made = Batches(data, order, batch_size=4, num_workers=0, prefetch=1, pin_memory=False)
        result = list(made)
        assert len(result) == len(order) == 5
        mine = set(task.eval_shards([rank], 3))
        assert read <= mine and (rank == 0 or read == mine < set(range(len(ends))))
        per_rank.append(np.concatenate([batch["inputs"]["input_ids"].numpy() for batch in result]))
        labels += sum(batch["count"] for batch in result)
    drawn = data.draw(np.arange(49)[None])
    assert (order.merged(per_rank) == drawn["inputs"]["input_ids"][0].numpy()).all()
    assert labels == drawn["count"][0]
    padding = data.draw(np.array([[0, PADDING]]))
    assert (padding["inputs"]["labels"][0, 1] == IGNORE_INDEX).all()
    assert padding["count"] == [int((padding["inputs"]["labels"] != IGNORE_INDEX).sum())]


def test_a_part_of_the_evaluation_is_drawn_by_the_seed_and_masked_as_in_the_whole(shards):
    part, other = (
        build_task(train_config(shards / "run", shards, "eval_examples=9", f"seed={n}"))
        for n in (0, 1)
    )
    rows = part.eval_sample
    assert (
        part.eval_rows == len(set(rows)) == 9
        and rows.tolist() != list(range(9))
        and (rows != other.eval_sample).any()
    )
    whole = build_task(train_config(shards / "run", shards)).eval_data().draw(rows[None])["inputs"]
    drawn = part.eval_data().draw(np.arange(9)[None])["inputs"]
    assert all(
        torch.equal(drawn[name], whole[name]) for name in ("input_ids", "labels", "positions")
    )


@pytest.mark.parametrize("numbers", [[0, 10**6], [-1], [3, -(10**6), 5]])
def test_a_number_that_no_sequence_has_is_an_error(shards, numbers):
    rejects(
        "sequences .* but there are",
        rows_of(shards).shards.rows,
        np.array(numbers),
        error=IndexError,
    )


@pytest.mark.parametrize("lacks", ["shared memory", "space in it", "a short TMPDIR"])
def test_a_machine_that_cannot_have_loader_processes_reads_the_same_batches_without(
    shards, monkeypatch, log, lacks
):
    expected = list(islice(loader_of(shards, num_workers=1), 3))
    if lacks == "shared memory":
        monkeypatch.setattr(loader, "SHARED_MEMORY", Path("/nowhere"))
    elif lacks == "space in it":
        monkeypatch.setattr(loader, "SHARED_BYTES", 2**60)
    else:
        monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 120}")
    monkeypatch.setattr(atomic_io, "said", set())
    batches = loader_of(shards, num_workers=1)
    assert batches.loader is None or batches.loader.num_workers == 0
    for ours, theirs in zip(islice(batches, 3), expected, strict=True):
        for name, tensor in theirs["inputs"].items():
            assert torch.equal(ours["inputs"][name], tensor)
    assert "data.num_workers=1: the rank reads its data itself, since " in log.text
