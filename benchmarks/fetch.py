"""Client CPU of fetching shards from S3 to files with their sha256: ours, the connector by itself, boto3.

    python -m benchmarks.fetch [--rounds 5] [--shards 16] [--mb 64]

Every measurement has its own process and four threads, all from one server on this machine, in turn. `stream` is the
connector's native part alone: it writes nothing and hashes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import resource
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import boto3

from benchmarks import harness
from benchmarks.harness import ROOT, Result, run, spread, table

sys.path.append(str(ROOT / "tests"))  # the S3 server of the tests
from services.fault_proxy import FaultProxy
from services.s3_server import S3Server

REGION = "us-east-1"

BUCKET, THREADS, READ_BYTES = "benchmark-fetch", 4, 2**20
Fetch = Callable[[str], object]


def ours(endpoint: str, shards: list[Any], folder: Path) -> Fetch:
    from train.config import S3Config, ShardsConfig
    from train.data.shards.cache import ShardCache
    from train.data.shards.download import Downloader
    from train.data.shards.prefetch import keep_memory
    from train.storage.s3 import S3Folder

    keep_memory()  # as the process that fetches for a run
    source = S3Folder(f"s3://{BUCKET}", S3Config(endpoint=endpoint, region=REGION, path_style=True))
    manifest: Any = SimpleNamespace(shards=shards, id="benchmark")
    cache = ShardCache(ShardsConfig(path="", cache_dir=str(folder)), manifest)
    cache.hold(alone=True)
    downloader = Downloader(source, cache)
    by_name = {shard.file: shard for shard in shards}
    return lambda name: downloader.download(by_name[name], limit_s=300)


def connector(endpoint: str, shards: list[Any], folder: Path) -> Fetch:
    from s3torchconnector import S3ReaderConstructor

    open_object = connector_reader(endpoint, shards, S3ReaderConstructor.sequential())

    def read(name: str) -> Iterator[bytes]:
        reader = open_object(name)
        while chunk := reader.read(READ_BYTES):
            yield chunk

    return written_and_hashed(read, folder)


def stream(endpoint: str, shards: list[Any], folder: Path) -> Fetch:
    from train.data.shards.download import stream_constructor

    open_object = connector_reader(endpoint, shards, stream_constructor)
    return lambda name: deque(open_object(name)(), maxlen=0)


def connector_reader(endpoint: str, shards: list[Any], constructor: Any) -> Callable[[str], Any]:
    from s3torchconnector import S3ClientConfig, S3MapDataset

    names = [shard.file for shard in shards]
    dataset = S3MapDataset.from_objects(
        [f"s3://{BUCKET}/{name}" for name in names],
        region=REGION,
        endpoint=endpoint,
        reader_constructor=constructor,
        s3client_config=S3ClientConfig(part_size=max(shard.bytes for shard in shards), force_path_style=True),
    )
    return lambda name: dataset[names.index(name)]


def boto(endpoint: str, shards: list[Any], folder: Path) -> Fetch:
    client = boto3.client("s3", endpoint_url=endpoint, region_name=REGION)

    def read(name: str) -> Iterator[bytes]:
        chunks: Iterator[bytes] = client.get_object(Bucket=BUCKET, Key=name)["Body"].iter_chunks(READ_BYTES)
        return chunks

    return written_and_hashed(read, folder)


def written_and_hashed(read: Callable[[str], Iterable[bytes]], folder: Path) -> Fetch:
    def fetch(name: str) -> None:
        digest = hashlib.sha256()
        with (folder / name).open("wb") as file:
            for chunk in read(name):
                file.write(chunk)
                digest.update(chunk)

    return fetch


FETCHERS = {"ours": ours, "connector": connector, "stream": stream, "boto3": boto}


def measure(name: str, path: dict[str, Any]) -> Result:
    from train.data.shards.format import Shard

    shards = [Shard(**shard) for shard in path["shards"]]
    with tempfile.TemporaryDirectory() as folder:
        fetch = FETCHERS[name](path["endpoint"], shards, Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, [shard.file for shard in shards]))
        after = resource.getrusage(resource.RUSAGE_SELF)
    gigabytes = sum(shard.bytes for shard in shards) / 1e9
    user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return {
        "user": user_s / gigabytes,
        "system": system_s / gigabytes,
        "both": (user_s + system_s) / gigabytes,
        "pages": (after.ru_minflt - before.ru_minflt) * resource.getpagesize() / gigabytes / 1e9,
    }


@contextmanager
def s3_server(folder: Path) -> Iterator[tuple[Any, FaultProxy]]:
    """boto3's client of a server on this machine, and the proxy before it, which counts requests."""
    server = S3Server(folder / "server", ends_with_pid=os.getpid())
    os.environ |= {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret}
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    proxy = FaultProxy(urlsplit(server.endpoint).port or 80, log=folder / "proxy.log")
    try:
        yield boto3.client("s3", endpoint_url=server.endpoint, region_name=REGION), proxy
    finally:
        proxy.stop()


def upload(client: Any, number: int, size: int) -> list[Result]:
    client.create_bucket(Bucket=BUCKET)
    shards = []
    for index in range(number):
        content = random.Random(index).randbytes(size)
        name = f"train-{index:05d}.safetensors"
        client.put_object(Bucket=BUCKET, Key=name, Body=content)
        shards.append({"file": name, "rows": 1, "bytes": size, "sha256": hashlib.sha256(content).hexdigest()})
    return shards


def main() -> None:
    parser = harness.parser(__doc__, rounds=5, shards=16, mb=64)  # of a shard: 64 MiB is what the preparation writes
    parser.add_argument("--measure", choices=FETCHERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, json.loads(os.environ["PLACE"]))), flush=True)
        os._exit(0)  # the connector's threads may take long to end
    results: dict[str, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as (client, proxy):
        path = {"endpoint": proxy.endpoint, "shards": upload(client, options.shards, options.mb * 2**20)}
        for _, name in itertools.product(range(options.rounds), FETCHERS):
            proxy.set()
            command = (sys.executable, "-m", "benchmarks.fetch", "--measure", name)
            result = json.loads(run(*command, PLACE=json.dumps(path)).splitlines()[-1])
            result["gets"] = len(proxy.requests("^GET .*safetensors")) / options.shards
            print(f"{name}: {result}", file=sys.stderr)
            results[name].append(result)
    head = ("", "CPU, s/GB", "user", "system", "new memory touched, of the bytes fetched", "GETs for each shard")
    keys = ("both", "user", "system", "pages", "gets")
    rows = [(name, *(spread([one[key] for one in result], 2) for key in keys)) for name, result in results.items()]
    print(table(head, rows))


if __name__ == "__main__":
    main()
