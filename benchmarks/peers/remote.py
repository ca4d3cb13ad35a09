"""One loader's cold start and first epoch from an S3-compatible server, on a node of several ranks, its cache empty.

python -m benchmarks.peers.remote READER FOLDER CACHE, under torchrun, with PLACE as JSON in the environment. Prints one
line of JSON. CPU time of the client is that of all its processes in the first epoch, less that of a second one, which
reads the cache.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.modules["torch_xla"] = None  # type: ignore[assignment]  # see measure.py

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.corpus import Corpus, read_corpus
from benchmarks.peers.readers import Gathered, import_litdata, litdata_loader, mds_loader, streaming

REGION = "us-east-1"


@dataclass(frozen=True)
class Place:
    endpoint: str
    bucket: str

    def location(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"


# ---- loaders: a rank's batches, epoch after epoch ------------------------------------------------------------------

Build = Callable[[Corpus, Place, Path], AbstractContextManager[Iterator[Tensor]]]


@contextmanager
def ours(corpus: Corpus, folder: Place, cache: Path) -> Iterator[Iterator[Tensor]]:
    from train.config import S3Config, ShardsConfig
    from train.data.batches.loader import Batches
    from train.data.shards.order import ShardSampler
    from train.data.shards.prepared import PreparedData

    cfg = ShardsConfig(path=folder.location("ours"), cache_dir=str(cache))
    data = PreparedData(cfg, S3Config(endpoint=folder.endpoint, region=REGION, path_style=True))
    sampler = ShardSampler(
        [shard.rows for shard in data.manifest.splits["train"]],
        seed=0,
        global_batch_size=corpus.batch * dist.get_world_size(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        windows=data.shuffle_block(),
    )
    with data.prefetcher(sampler, is_first_on_machine=dist.get_rank() == 0):
        dist.barrier()  # as in training: none reads before the cache is in order
        batches = Batches(
            Gathered(data.split("train")),
            sampler.micro_batches(corpus.batch),
            batch_size=corpus.batch,
            num_workers=0,
            prefetch=4,
            pin_memory=False,
        )
        yield (batch["inputs"]["input_ids"].long() for batch in batches)


@contextmanager
def litdata(corpus: Corpus, folder: Place, cache: Path) -> Iterator[Iterator[Tensor]]:
    from litdata.streaming import downloader

    if folder.endpoint.startswith("http:"):  # which no setting of its own lets its client take
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    options = {"endpoint_url": folder.endpoint, "region_name": REGION}
    yield again(litdata_loader(corpus, folder.location("litdata"), cache_dir=str(cache), storage_options=options))


@contextmanager
def mds(corpus: Corpus, folder: Place, cache: Path) -> Iterator[Iterator[Tensor]]:
    os.environ["S3_ENDPOINT_URL"] = folder.endpoint
    yield again(mds_loader(corpus, local=str(cache), remote=folder.location("mds")))


def again(loader: Any) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def import_ours() -> None:
    import train.data.batches.loader
    import train.data.shards.prefetch
    import train.data.shards.prepared  # noqa: F401


LOADERS: dict[str, tuple[Callable[[], Any], Build]] = {
    "ours": (import_ours, ours),
    "litdata": (import_litdata, litdata),
    "mds": (streaming, mds),
}


# ---- the measurement -----------------------------------------------------------------------------------------------


def cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measure(name: str, corpus: Corpus, folder: Place, cache: Path) -> dict[str, Any]:
    """Of all ranks: CPU seconds added up, the longest of other times."""
    load, build = LOADERS[name]
    load()
    batches_of_rank = corpus.batches // dist.get_world_size() - 1  # peers leave out some at the end
    dist.barrier()
    own, children, start = cpu_s(resource.RUSAGE_SELF), cpu_s(resource.RUSAGE_CHILDREN), time.perf_counter()
    with build(corpus, folder, cache) as batches:
        next(batches)
        first_batch_s = time.perf_counter() - start
        read(batches, batches_of_rank - 1)
        epoch_s = time.perf_counter() - start
        cold_s = cpu_s(resource.RUSAGE_SELF) - own
        read(batches, corpus.batches // dist.get_world_size() - batches_of_rank)  # to the end of the epoch
        dist.barrier()
        own = cpu_s(resource.RUSAGE_SELF)
        read(batches, batches_of_rank)
        warm_s = cpu_s(resource.RUSAGE_SELF) - own
        dist.barrier()
    client_s = cold_s - warm_s + cpu_s(resource.RUSAGE_CHILDREN) - children
    longest, total = torch.tensor([first_batch_s, epoch_s]), torch.tensor(client_s)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return {"first_batch_s": longest[0].item(), "epoch_s": longest[1].item(), "client_cpu_s": total.item()}


def read(batches: Iterator[Tensor], number: int) -> None:
    for _ in itertools.islice(batches, number):
        pass


def main() -> None:
    name, folder, cache = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(name, read_corpus(Path(folder)), Place(**json.loads(os.environ["PLACE"])), Path(cache))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # some loaders leave threads behind


if __name__ == "__main__":
    main()
