"""Token shards from one part of a corpus. A part that was killed resumes after its last complete shard."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from train.config import InputError, PrepareConfig
from train.data.random_bits import text_uniform
from train.data.shards.format import ROW_TENSORS, SPLITS, Rows, Shard, TokenizerInfo, write_shard
from train.data.text.corpus import Corpus
from train.data.text.documents import Part
from train.data.text.encoding import Encoded, Vocabulary, encoded, starts_of
from train.data.text.packing import Packer
from train.storage.folders import Folder
from train.storage.schema import read_object, record

SHARD_BYTES = 64 * 2**20  # if rows_per_shard does not say otherwise
ROWS_APART = 2**40  # between the numbers of two parts' first sequences, so that each draws its own cuts
STATE_NAMES = "part-"
MOST_WEIGHED_CHARS = 64 * 2**20  # in a larger corpus chance evens out, and it is not read once more
LONG_CHARS = 2**16  # a document with more is divided between the splits

Report = Callable[[int, int], None]  # bytes of the corpus and tokens that have been dealt with since the last call


@dataclass(frozen=True)
class HeldOut:
    """What of a document is for validation, as a function of its text: the end of it if it is long, else all or
    nothing, by its hash.
    """

    seed: int
    below: float  # the hash of shorter documents that are held out
    longest: float  # characters, of documents that the hash decides on
    tail: float  # share of each longer one

    def share_of(self, text: str) -> float:
        return self.tail if len(text) > self.longest else float(text_uniform(text, self.seed)[0] < self.below)


def choose_held_out(corpus: Corpus, fraction: float, seed: int) -> HeldOut:
    """Hold out `fraction` of the characters: the end of each long document, and of the others those with the lowest
    hashes. Long is what has more than LONG_CHARS, or more than all that is held out of a corpus that can be weighed.
    """
    not_weighed = HeldOut(seed, fraction, LONG_CHARS, fraction)
    if (corpus.total_bytes or 0) > 4 * MOST_WEIGHED_CHARS:  # no encoding has longer characters
        return not_weighed
    found: list[tuple[float, int]] = []
    total = 0
    for document in corpus.documents():
        found.append((text_uniform(document.text, seed)[0], len(document.text)))
        total += len(document.text)
        if total > MOST_WEIGHED_CHARS:
            return not_weighed
    longest = min(fraction * total, LONG_CHARS)
    short = sorted(each for each in found if each[1] <= longest)
    sums = np.cumsum([0, *(size for _, size in short)])
    count = int(np.abs(sums - fraction * sums[-1]).argmin())
    return HeldOut(seed, short[count][0] if count < len(short) else 1.0, longest, fraction)


def label(part: Part) -> str:
    return f"{part.index + 1:0{len(str(part.count))}}of{part.count}"


def state_name(part: Part) -> str:
    return f"{STATE_NAMES}{label(part)}.safetensors"


def shard_name(split: str, part: Part, index: int) -> str:
    """train-00000.safetensors, or train-03of64-00000.safetensors of one part of many."""
    return f"{split}-{label(part)}-{index:05d}.safetensors" if part.count > 1 else f"{split}-{index:05d}.safetensors"


def rows_of_shard(seq_len: int, dtype: np.dtype) -> int:
    """Sequences in about SHARD_BYTES: tokens, pivot and same_document."""
    return max(1, SHARD_BYTES // (seq_len * dtype.itemsize + 3))


@dataclass(frozen=True)
class PartState:
    """The state of a part, from which a later process continues and which the merge reads."""

    identity: str  # of the whole preparation
    tokenizer: TokenizerInfo
    finished: bool
    shards: dict[str, list[Shard]]
    done: dict[str, int]  # documents, source_bytes, tokens, unknown_tokens
    next_row: dict[str, int]
    arrays: dict[str, Any]  # np.ndarray: token_counts, and of each split the tokens and sequences not written yet

    def to_bytes(self) -> bytes:
        facts = {"tokenizer": asdict(self.tokenizer), "finished": self.finished, "done": self.done}
        facts |= {"shards": {split: [asdict(shard) for shard in shards] for split, shards in self.shards.items()}}
        facts |= {"identity": self.identity, "next_row": self.next_row}
        return save({name: np.ascontiguousarray(array) for name, array in self.arrays.items()} | packed(facts))

    @staticmethod
    def from_bytes(content: bytes) -> PartState:
        arrays = load(content)
        return record(PartState, {**read_object(arrays.pop("facts").tobytes()), "arrays": arrays})


def packed(facts: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}


def read_state(folder: Folder, part: Part, identity: str) -> PartState | None:
    """How far a part has come; None if it has not begun. InputError if it is another preparation's."""
    name = state_name(part)
    try:
        state = PartState.from_bytes(folder.read(name))
    except FileNotFoundError:
        return None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder.location}/{name} is damaged ({error}); remove it and prepare the part again"
        ) from error
    if state.identity != identity:
        raise InputError(f"{folder.location}/{name} is of a preparation with other settings; choose another output")
    return state


def prepare_part(
    cfg: PrepareConfig,
    folder: Folder,
    corpus: Corpus,
    vocabulary: Vocabulary,
    held_out: HeldOut,
    part: Part,
    identity: str,
    report: Report,
) -> None:
    """Write a part's shards and its state. A part that was begun is continued; a finished one is left alone."""
    work = Preparation(
        folder,
        vocabulary,
        held_out,
        part,
        identity=identity,
        seq_len=cfg.seq_len,
        rows_per_shard=cfg.rows_per_shard or rows_of_shard(cfg.seq_len, vocabulary.dtype),
    )
    finished = work.resume()
    report(work.done["source_bytes"], 0)
    if finished:
        return
    documents = islice(corpus.documents(part), work.done["documents"], None)
    with work.uploads:
        for chunk in encoded(documents, vocabulary):
            work.add(chunk)
            report(sum(document.source_bytes for document in chunk.documents), len(chunk.tokens))
        work.finish()


class Preparation:
    """Packs the tokens of documents and writes them as shards."""

    def __init__(
        self,
        folder: Folder,
        vocabulary: Vocabulary,
        held_out: HeldOut,
        part: Part,
        *,
        identity: str,
        seq_len: int,
        rows_per_shard: int,
    ) -> None:
        self.folder, self.vocabulary, self.part, self.identity = folder, vocabulary, part, identity
        self.held_out, self.rows_per_shard = held_out, rows_per_shard
        starts, info, first = starts_of(vocabulary.open()), vocabulary.info, part.index * ROWS_APART
        self.packers = {
            split: Packer(seq_len, info.cls_id, info.sep_id, starts, held_out.seed + number, vocabulary.dtype, first)
            for number, split in enumerate(SPLITS)
        }
        nothing = np.empty(0, np.int32), np.empty(0, np.int64)
        self.pending: dict[str, list[Rows]] = {split: [packer.add(*nothing)] for split, packer in self.packers.items()}
        self.shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}  # changed by uploads only
        self.done = {"documents": 0, "source_bytes": 0, "tokens": 0, "unknown_tokens": 0, "validation_pairs": 0}
        self.token_counts = np.zeros(info.vocab_size, np.int64)  # of the training split
        self.uploads, self.written = ThreadPoolExecutor(1), Future[None]()  # in order, one piece at a time
        self.written.set_result(None)

    def add(self, chunk: Encoded) -> None:
        """Pack a chunk; write each shard that is full."""
        shares = np.array([self.held_out.share_of(document.text) for document in chunk.documents])
        held_out = np.round(shares * chunk.lengths).astype(np.int64)  # tokens at the end of each document
        of_token = np.arange(len(chunk.tokens)) >= np.repeat(np.cumsum(chunk.lengths) - held_out, chunk.lengths)
        for split, (tokens, lengths) in {
            "train": (chunk.tokens[~of_token], (chunk.lengths - held_out)[shares < 1]),
            "validation": (chunk.tokens[of_token], held_out[held_out > 0]),
        }.items():
            self.pending[split].append(self.packers[split].add(tokens, lengths))
            if split == "train":
                self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))
                if self.vocabulary.unk_id is not None:
                    self.done["unknown_tokens"] += int((tokens == self.vocabulary.unk_id).sum())
        self.done["documents"] += len(chunk.documents)
        self.done["source_bytes"] += sum(document.source_bytes for document in chunk.documents)
        self.done["tokens"] += len(chunk.tokens)
        if any(sum(map(len, rows)) >= self.rows_per_shard for rows in self.pending.values()):
            self.flush(finished=False)

    def finish(self) -> None:
        """Write the remaining sequences, and a state that says the part is finished."""
        self.flush(finished=True)
        self.written.result()

    def flush(self, *, finished: bool) -> None:
        """Begin to write waiting sequences as shards, the incomplete one too if it is the last, then the state."""
        size = self.rows_per_shard
        full: list[tuple[str, Rows]] = []
        for split, parts in self.pending.items():
            rows = Rows.concatenate(parts)
            whole = len(rows) if finished else len(rows) // size * size
            # Sequences whose segments have an order, for sentence-order prediction; earlier versions counted none.
            if split == "validation" and "validation_pairs" in self.done:
                self.done["validation_pairs"] += int(rows.same_document[:whole].sum())
            full += [(split, rows[first : min(first + size, whole)]) for first in range(0, whole, size)]
            self.pending[split] = [rows[whole:].copy()]  # not to keep all of it in memory
        state = self.state(finished=finished)

        def work() -> None:
            for split, rows in full:
                name = shard_name(split, self.part, len(self.shards[split]))
                self.shards[split].append(write_shard(self.folder, name, rows))
            self.folder.write(state_name(self.part), state.to_bytes())

        self.written.result()  # an error of the piece before
        self.written = self.uploads.submit(work)

    def state(self, *, finished: bool) -> PartState:
        """The present state; shards that are still being written follow."""
        arrays = {"token_counts": self.token_counts.copy()}
        for split, packer in self.packers.items():
            rows = Rows.concatenate(self.pending[split])
            tensors = {"stream": packer.stream, **vars(rows)}
            arrays |= {f"{split}.{name}": tensor for name, tensor in tensors.items()}
        return PartState(
            identity=self.identity,
            tokenizer=self.vocabulary.info,
            finished=finished,
            shards=self.shards,
            done=dict(self.done),
            next_row={split: packer.next_row for split, packer in self.packers.items()},
            arrays=arrays,
        )

    def resume(self) -> bool:
        """Continue the work of an earlier process, if there is any; True if all of it is done."""
        state = read_state(self.folder, self.part, self.identity)
        if state is None:
            return False
        self.token_counts, self.done, self.shards = state.arrays["token_counts"].copy(), state.done, state.shards
        for split, packer in self.packers.items():
            packer.stream, packer.next_row = state.arrays[f"{split}.stream"], state.next_row[split]
            self.pending[split] = [Rows(*(state.arrays[f"{split}.{name}"] for name in ROW_TENSORS))]
        return state.finished
