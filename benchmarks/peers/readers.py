"""One reader for each loader: shuffled batches [batch, seq_len] of int64 torch tensors, in the way its pages advise.

`first` is the number of batches to leave out at the start of an epoch, if a loader has no state.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.peers.corpus import VOCAB_SIZE, Corpus

# ---- plain numpy ---------------------------------------------------------------------------------------------------


def orders(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yield the rows of one batch after the other, in a full permutation, without end."""
    for epoch in itertools.count():
        order = np.random.default_rng([0, epoch]).permutation(corpus.rows)
        for start in range(0, corpus.batches * corpus.batch, corpus.batch):
            yield order[start : start + corpus.batch]


def limit(corpus: Corpus) -> Iterator[Tensor]:
    """Yield whole batches out of one flat file, without a DataLoader."""
    flat = corpus.flat()
    for rows in orders(corpus):
        yield torch.from_numpy(flat[rows].astype(np.int64))


# ---- ours ----------------------------------------------------------------------------------------------------------


class Gathered:
    """Sequences as they are stored: the cost of a loader without masks. Rows after the last begin again."""

    def __init__(self, shards: Any) -> None:
        self.shards = shards

    def draw(self, items: np.ndarray) -> dict[str, Any]:
        (tokens,) = self.shards.gather(items.ravel() % len(self.shards), ("tokens",))
        inputs = {"input_ids": torch.from_numpy(tokens.reshape(*items.shape, -1))}
        return {"inputs": inputs, "count": [0] * len(items), "tokens": [0] * len(items)}


def ours(
    corpus: Corpus,
    first: int = 0,
    *,
    num_workers: int = 0,
    masked: bool = False,
    shard_rows: list[int] | None = None,
) -> Iterator[Tensor]:
    """Read in our order; `shard_rows` replace those of the corpus: a larger one, to time its order."""
    from train.data.batches.loader import Batches, MaskedRows
    from train.data.batches.masking import Masker
    from train.data.shards.format import ShardSet, read_manifest
    from train.data.shards.order import ShardSampler

    manifest = read_manifest(corpus.path_of("ours"))
    shards = ShardSet(corpus.path_of("ours"), manifest, "train")
    rows: Any = Gathered(shards)
    if masked:
        masker = Masker(
            seed=0,
            mask_rate=0.15,
            max_predictions=max(1, round(corpus.seq_len * 0.15)),
            max_ngram=3,
            mask_id=manifest.tokenizer.mask_id,
            special_ids=tuple(manifest.tokenizer.special_ids),
            vocab_size=VOCAB_SIZE,
        )
        rows = MaskedRows(shards, masker, is_training=True)
    sampler = ShardSampler(
        shard_rows or [shard.rows for shard in manifest.splits["train"]],
        seed=0,
        global_batch_size=corpus.batch,
        rank=0,
        world_size=1,
        consumed_rows=first * corpus.batch,
    )
    order, size = sampler.micro_batches(corpus.batch), corpus.batch
    batches = Batches(rows, order, batch_size=size, num_workers=num_workers, prefetch=4, pin_memory=False)
    return (batch["inputs"]["input_ids"].long() for batch in batches)


def write_ours(corpus: Corpus) -> None:
    from benchmarks.pretraining import write_tokenizer
    from train.data.shards.format import write_manifest, write_shard
    from train.data.text.packing import Rows as PackedRows
    from train.system.folders import LocalFolder

    folder = LocalFolder(corpus.path_of("ours"))
    pivot = np.full(corpus.shard_rows, corpus.seq_len // 2, np.uint16)
    same_document = np.ones(corpus.shard_rows, np.uint8)
    shards = [
        write_shard(folder, f"train-{number:05d}.safetensors", PackedRows(corpus.shard(number), pivot, same_document))
        for number in range(corpus.shards)
    ]
    splits, tokenizer = {"train": shards, "validation": []}, write_tokenizer(folder, VOCAB_SIZE)
    sizes = {"seq_len": corpus.seq_len, "dtype": "uint16"}
    write_manifest(folder, **sizes, splits=splits, tokenizer=tokenizer, counts={}, config={})


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def write_hf(corpus: Corpus) -> None:
    import datasets
    import pyarrow as pa

    flat = pa.array(np.asarray(corpus.flat()).ravel())
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, corpus.seq_len)})
    datasets.Dataset(table).save_to_disk(corpus.path_of("hf"), num_shards=corpus.shards)


def hf_torch(corpus: Corpus) -> DataLoader[Any]:
    import datasets

    def stack(rows: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([row["tokens"] for row in rows]).long()

    rows: Any = datasets.load_from_disk(corpus.path_of("hf")).with_format("torch")
    return DataLoader(rows, corpus.batch, shuffle=True, drop_last=True, collate_fn=stack)


# ---- LitData -------------------------------------------------------------------------------------------------------


class FlatRows:
    """Rows of a shard, for LitData's writer, which sends this to another process."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __call__(self, shard: int) -> Iterator[Tensor]:
        yield from torch.from_numpy(np.array(self.corpus.shard(shard)))


def write_litdata(corpus: Corpus) -> None:
    import litdata

    litdata.optimize(
        FlatRows(corpus),
        list(range(corpus.shards)),
        str(corpus.path_of("litdata")),
        num_workers=1,
        chunk_size=corpus.shard_rows * corpus.seq_len,
        item_loader=litdata.TokensLoader(block_size=corpus.seq_len),
    )


def read_litdata(corpus: Corpus) -> Any:
    import litdata

    items = litdata.TokensLoader(block_size=corpus.seq_len)
    data = litdata.StreamingDataset(str(corpus.path_of("litdata")), item_loader=items, shuffle=True)
    return litdata.StreamingDataLoader(
        data, batch_size=corpus.batch, collate_fn=lambda rows: torch.stack(rows).long(), drop_last=True
    )


# ---- mosaicml-streaming --------------------------------------------------------------------------------------------


def streaming() -> Any:
    """Return streaming, with a stub for torchvision, which it imports, if that does not match this build of torch."""
    try:
        import streaming as module
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] in ("streaming", "torchvision")]:
            del sys.modules[name]
        for part in ("", ".datasets", ".transforms", ".transforms.functional"):
            sys.modules[f"torchvision{part}"] = types.ModuleType(f"torchvision{part}")
        sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})  # type: ignore[attr-defined]
        sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
        import streaming as module
    return module


def write_mds(corpus: Corpus) -> None:
    columns = {"tokens": f"ndarray:uint16:{corpus.seq_len}"}
    size_limit = corpus.shard_rows * (2 * corpus.seq_len + 4) + 2**16  # a shard of ours
    with streaming().MDSWriter(out=str(corpus.path_of("mds")), columns=columns, size_limit=size_limit) as writer:
        for row in corpus.flat():
            writer.write({"tokens": np.asarray(row)})


def mds(corpus: Corpus) -> Any:
    """Return MDS data in its default order, py1e."""

    def stack(samples: list[dict[str, np.ndarray]]) -> Tensor:
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    local, size = str(corpus.path_of("mds")), corpus.batch
    data = streaming().StreamingDataset(shuffle=True, batch_size=size, local=local)
    return streaming().StreamingDataLoader(data, batch_size=size, collate_fn=stack, drop_last=True)


# ---- the table of them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    label: str
    build: Callable[..., Iterable[Tensor]]
    load: Callable[[], Any] | None = None  # imports the library
    format: str = "flat.bin"  # file or folder of the corpus, see WRITERS
    environment: str = "ours"
    measures: tuple[str, ...] = ("speed",)
    resume: str = "state_dict"  # or "first": the number of batches is all the state
    num_workers: int = 0


def readers_of_ours() -> dict[str, Reader]:
    """Return our readers with and without masks, each with none, one and two workers."""
    load, result = partial(import_module, "train.data.batches.loader"), {}
    labels = {"ours": ("**ours**", "ours, 1 worker", "ours, 2 workers")}
    labels["masked"] = ("ours with masks", "ours with masks, 1 worker", "ours with masks, 2 workers")
    for name, workers in itertools.product(labels, range(3)):
        result[f"{name}_{workers}" if workers else name] = Reader(
            labels[name][workers],
            partial(ours, num_workers=workers, masked=name == "masked"),
            load,
            format="ours",
            measures=("speed", "resume") if name == "ours" and not workers else ("speed",),
            resume="first",
            num_workers=workers,
        )
    return result


BOTH = ("speed", "resume")
READERS = {
    "limit": Reader("numpy: one memmap, whole batches, no DataLoader (the limit)", limit),
    **readers_of_ours(),
    "hf_torch": Reader("datasets, torch format, DataLoader", hf_torch, partial(import_module, "datasets"), "hf"),
    "litdata": Reader(
        "LitData, TokensLoader", read_litdata, partial(import_module, "litdata"), "litdata", "litdata", BOTH
    ),
    "mds": Reader("mosaicml-streaming, MDS", mds, streaming, "mds", "mds", BOTH),
}
WRITERS = {"ours": write_ours, "hf": write_hf, "litdata": write_litdata, "mds": write_mds}
