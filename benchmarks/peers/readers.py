"""One reader for each loader: shuffled batches [batch, seq_len] of int64 torch tensors, in the way its pages advise.

`first` is the number of batches to leave out at the start of an epoch, where a loader has no state of its own.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.peers.corpus import FIRST_ID, VOCAB_SIZE, Corpus

# ---- plain numpy ---------------------------------------------------------------------------------------------------


def orders(corpus: Corpus) -> Iterator[np.ndarray]:
    """The rows of one batch after the other, in a full permutation, for ever."""
    for epoch in itertools.count():
        order = np.random.default_rng([0, epoch]).permutation(corpus.rows)
        for start in range(0, corpus.batches * corpus.batch, corpus.batch):
            yield order[start : start + corpus.batch]


def limit(corpus: Corpus) -> Iterator[Tensor]:
    """Whole batches out of one flat file, without a DataLoader."""
    flat = corpus.flat()
    for rows in orders(corpus):
        yield torch.from_numpy(flat[rows].astype(np.int64))


# ---- ours ----------------------------------------------------------------------------------------------------------


class Gathered:
    """Sequences as they are stored: what a loader costs without masks. Rows after the last begin again."""

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
    windows: Any = None,
) -> Iterator[Tensor]:
    """`shard_rows` in place of the corpus' own: a larger one, to time its order."""
    from train.data.batches.loader import Batches, MaskedRows
    from train.data.batches.masking import Masker
    from train.data.shards.format import ShardSet, read_manifest
    from train.data.shards.order import ShardSampler

    manifest = read_manifest(corpus.path_of("ours"))
    shards = ShardSet(corpus.path_of("ours"), manifest, "train")
    masker = Masker(
        seed=0,
        mask_rate=0.15,
        max_predictions=max(1, round(corpus.seq_len * 0.15)),
        max_ngram=3,
        mask_id=manifest.tokenizer.mask_id,
        special_ids=tuple(manifest.tokenizer.special_ids),
        vocab_size=VOCAB_SIZE,
    )
    sampler = ShardSampler(
        shard_rows or [shard.rows for shard in manifest.splits["train"]],
        seed=0,
        global_batch_size=corpus.batch,
        rank=0,
        world_size=1,
        windows=windows,
        consumed_rows=first * corpus.batch,
    )
    batches = Batches(
        MaskedRows(shards, masker, is_training=True) if masked else Gathered(shards),
        sampler.micro_batches(corpus.batch),
        batch_size=corpus.batch,
        num_workers=num_workers,
        prefetch=4,
        pin_memory=False,
    )
    return (batch["inputs"]["input_ids"].long() for batch in batches)


def write_ours(corpus: Corpus) -> None:
    from train.data.shards.format import TokenizerInfo, write_manifest, write_shard
    from train.data.shards.prepared import TOKENIZER
    from train.data.text.packing import Rows as PackedRows
    from train.storage.folders import LocalFolder, sha256_bytes

    folder = LocalFolder(corpus.path_of("ours"))
    pivot = np.full(corpus.shard_rows, corpus.seq_len // 2, np.uint16)
    same_document = np.ones(corpus.shard_rows, np.uint8)
    shards = [
        write_shard(folder, f"train-{number:05d}.safetensors", PackedRows(corpus.shard(number), pivot, same_document))
        for number in range(corpus.shards)
    ]
    for name in TOKENIZER:
        folder.write(name, b"{}")
    special = list(range(FIRST_ID))
    write_manifest(
        folder,
        seq_len=corpus.seq_len,
        dtype="uint16",
        splits={"train": shards, "validation": []},
        tokenizer=TokenizerInfo(
            sha256_bytes(b"{}"), VOCAB_SIZE, cls_id=2, sep_id=3, mask_id=4, pad_id=0, special_ids=special
        ),
        counts={},
        config={},
    )


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def write_hf(corpus: Corpus) -> None:
    import datasets
    import pyarrow as pa

    flat = pa.array(np.asarray(corpus.flat()).ravel())
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, corpus.seq_len)})
    datasets.Dataset(table).save_to_disk(corpus.path_of("hf"), num_shards=corpus.shards)


def hf(corpus: Corpus, form: str) -> Any:
    import datasets

    return datasets.load_from_disk(corpus.path_of("hf")).with_format(form)


def hf_torch(corpus: Corpus) -> DataLoader[Any]:
    def stack(rows: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([row["tokens"] for row in rows]).long()

    return DataLoader(hf(corpus, "torch"), corpus.batch, shuffle=True, drop_last=True, collate_fn=stack)


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


def litdata_loader(corpus: Corpus, folder: str, **options: Any) -> Any:
    import litdata

    items = litdata.TokensLoader(block_size=corpus.seq_len)
    data = litdata.StreamingDataset(folder, item_loader=items, shuffle=True, **options)
    return litdata.StreamingDataLoader(
        data, batch_size=corpus.batch, collate_fn=lambda rows: torch.stack(rows).long(), drop_last=True
    )


def read_litdata(corpus: Corpus) -> Any:
    return litdata_loader(corpus, str(corpus.path_of("litdata")))


# ---- mosaicml-streaming --------------------------------------------------------------------------------------------


def streaming() -> Any:
    """It imports torchvision, for data sets of images; a stub does where that does not match this build of torch."""
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


def mds_loader(corpus: Corpus, **places: str) -> Any:
    """In its default order, py1e."""

    def stack(samples: list[dict[str, np.ndarray]]) -> Tensor:
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    data = streaming().StreamingDataset(shuffle=True, batch_size=corpus.batch, **places)
    return streaming().StreamingDataLoader(data, batch_size=corpus.batch, collate_fn=stack, drop_last=True)


def mds(corpus: Corpus) -> Any:
    return mds_loader(corpus, local=str(corpus.path_of("mds")))


# ---- the table of them ---------------------------------------------------------------------------------------------


def nothing() -> None: ...


def import_ours() -> None:
    pass


def import_hf() -> None:
    import datasets  # noqa: F401


def import_litdata() -> None:
    import litdata  # noqa: F401


@dataclass(frozen=True)
class Reader:
    label: str
    build: Callable[..., Iterable[Tensor]]
    load: Callable[[], Any] = nothing  # imports what it needs
    format: str = "flat.bin"  # file or folder of the corpus, see WRITERS
    environment: str = "ours"
    measures: tuple[str, ...] = ("speed", "memory")
    resume: str = "state_dict"  # or "first": the number of batches is all the state
    has_workers: bool = False


def ours_with(**options: Any) -> Callable[..., Iterator[Tensor]]:
    return lambda corpus, first=0: ours(corpus, first, **options)


EVERYTHING, SPEED = ("speed", "memory", "resume"), ("speed",)
OURS: dict[str, Any] = {"load": import_ours, "format": "ours", "resume": "first"}
HF: dict[str, Any] = {"load": import_hf, "format": "hf"}
READERS = {
    "limit": Reader("numpy: one memmap, whole batches, no DataLoader (the limit)", limit),
    "ours": Reader("**ours**", ours, measures=EVERYTHING, **OURS),
    "ours_1": Reader("ours, 1 worker", ours_with(num_workers=1), has_workers=True, measures=SPEED, **OURS),
    "ours_2": Reader("ours, 2 workers", ours_with(num_workers=2), has_workers=True, measures=SPEED, **OURS),
    "masked": Reader("ours with masks", ours_with(masked=True), **OURS),
    "masked_1": Reader(
        "ours with masks, 1 worker", ours_with(masked=True, num_workers=1), has_workers=True, measures=SPEED, **OURS
    ),
    "masked_2": Reader(
        "ours with masks, 2 workers", ours_with(masked=True, num_workers=2), has_workers=True, measures=SPEED, **OURS
    ),
    "hf_torch": Reader("datasets, torch format, DataLoader", hf_torch, **HF),
    "litdata": Reader(
        "LitData, TokensLoader", read_litdata, import_litdata, "litdata", environment="litdata", measures=EVERYTHING
    ),
    "mds": Reader("mosaicml-streaming, MDS", mds, streaming, "mds", environment="mds", measures=EVERYTHING),
}
WRITERS = {
    "ours": write_ours,
    "hf": write_hf,
    "litdata": write_litdata,
    "mds": write_mds,
}
