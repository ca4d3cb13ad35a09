"""Token shards from the parts of a corpus, and their manifest. An interrupted part resumes after its last shard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from train.config import CorpusConfig, InputError, PrepareConfig, check, shortlist
from train.data.files.errors import naming
from train.data.random_bits import text_uniform
from train.data.shards.format import (
    ROW_TENSORS,
    SPLITS,
    DataManifest,
    Rows,
    Shard,
    TokenizerInfo,
    write_manifest,
    write_shard,
)
from train.data.text.corpus import Corpus
from train.data.text.coverage import UnusableText, unknown_share
from train.data.text.documents import CorpusPart, Document
from train.data.text.encoding import Encoded, Vocabulary, encoded, starts_of
from train.data.text.guessing import neighbour_accuracy, unigram_entropy
from train.data.text.packing import Packer
from train.storage.folders import Folder, at_once, sha256_bytes
from train.storage.schema import read_object, record

SHARD_BYTES = 64 * 2**20  # the size of a shard unless rows_per_shard is set
# distance between the first sequence indices of two parts, so that their random cuts differ
ROWS_APART = 2**40
STATE_NAMES = "part-"  # prefix of the files with the parts' states
# a larger corpus is not read twice to measure it: random choice is precise enough
MOST_WEIGHED_CHARS = 64 * 2**20
LONG_CHARS = 2**16  # a longer document is divided between the splits
TOKENS_OF = "train_tokens_"  # prefix of a count's name, before the number of the corpus (from 1)
OVERLAP = "documents_in_validation_too"  # a count: training documents left out because they are in corpus.validation

# called with the bytes of text and the tokens processed since the previous call
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class HeldOut:
    """The rule that holds out text for validation: the end of long documents, and shorter documents with a low hash.

    With corpus.validation, the rule holds out exactly the documents in it.
    """

    seed: int
    below: float = 0.0  # the hash below which shorter documents are held out
    longest: float = math.inf  # characters; a document with more is a long one
    tail: float = 0.0  # the held-out share of each long document
    known: frozenset[float] | None = None  # hashes of the documents of corpus.validation

    def share_of(self, document: Document) -> float:
        if len(document.text) > self.longest:
            return self.tail
        number = text_uniform(document.text, self.seed)[0]
        return float(number < self.below if self.known is None else number in self.known)

    def validates(self, document: Document) -> bool:
        """Return whether a document's held-out text goes into the validation split, which has each text only once."""
        return document.reading.copy == 0 if self.known is None else document.reading.is_validation


def choose_held_out(corpus: Corpus, fraction: float, seed: int) -> HeldOut:
    """Return the rule that holds out `fraction` of the characters of a corpus.

    A document is long if it has more than LONG_CHARS characters or, in a corpus that is small enough to measure, more
    than all held-out text. Repeated readings are not measured. With corpus.validation, nothing else is held out.
    """
    if (texts := corpus.validation()) is not None:
        return HeldOut(
            seed, known=frozenset(text_uniform(document.text, seed)[0] for document in texts)
        )
    not_weighed = HeldOut(seed, fraction, LONG_CHARS, fraction)
    if (
        corpus.total_bytes or 0
    ) > 4 * MOST_WEIGHED_CHARS:  # no encoding has characters of more than 4 bytes
        return not_weighed
    found: list[tuple[float, int]] = []
    total = 0
    for document in corpus.documents():
        if document.reading.copy:
            continue
        found.append((text_uniform(document.text, seed)[0], len(document.text)))
        total += len(document.text)
        if total > MOST_WEIGHED_CHARS:
            return not_weighed
    longest = min(fraction * total, LONG_CHARS)
    short = sorted(each for each in found if each[1] <= longest)
    sums = np.cumsum([0, *(size for _, size in short)])
    count = int(np.abs(sums - fraction * sums[-1]).argmin())
    return HeldOut(seed, short[count][0] if count < len(short) else 1.0, longest, fraction)


def corpora_counts(cfg: CorpusConfig) -> list[str]:
    """Return the names of additional counts: the tokens of each of several corpora, and OVERLAP if it applies."""
    numbers = range(1, len(cfg.sources) + 1) if len(cfg.sources) > 1 else ()
    return [
        *(f"{TOKENS_OF}{number}" for number in numbers),
        *([] if cfg.validation is None else [OVERLAP]),
    ]


def label(part: CorpusPart) -> str:
    return f"{part.index + 1:0{len(str(part.count))}}of{part.count}"


def state_name(part: CorpusPart) -> str:
    return f"{STATE_NAMES}{label(part)}.safetensors"


def shard_name(split: str, part: CorpusPart, index: int) -> str:
    """Return train-00000.safetensors, or train-03of64-00000.safetensors if there are several parts."""
    return (
        f"{split}-{label(part)}-{index:05d}.safetensors"
        if part.count > 1
        else f"{split}-{index:05d}.safetensors"
    )


def rows_of_shard(seq_len: int, dtype: np.dtype) -> int:
    """Return how many sequences (tokens, pivot and same_document) fill about SHARD_BYTES."""
    return max(1, SHARD_BYTES // (seq_len * dtype.itemsize + 3))


@dataclass(frozen=True)
class PartState:
    """The state of a part, from which a later process continues and which the merge reads."""

    identity: str  # the identity of the preparation (see Recipe)
    tokenizer: TokenizerInfo
    finished: bool
    shards: dict[str, list[Shard]]
    done: dict[str, int]  # documents, source_bytes, tokens, unknown_tokens
    next_row: dict[str, int]
    # np.ndarray: token_counts, and each split's tokens and sequences that are not in a shard
    arrays: dict[str, Any]

    def to_bytes(self) -> bytes:
        facts = asdict(replace(self, arrays={}))
        del facts["arrays"]
        arrays = {**self.arrays, "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    @staticmethod
    def from_bytes(content: bytes) -> PartState:
        arrays = load(content)
        return record(PartState, {**read_object(arrays.pop("facts").tobytes()), "arrays": arrays})


def read_state(folder: Folder, part: CorpusPart, identity: str) -> PartState | None:
    """Return a part's state; None if there is none. Raises InputError if it is damaged or from another preparation."""
    name = state_name(part)
    try:
        content = folder.read(name)
    except FileNotFoundError:
        return None
    hint = "; remove it and prepare the part again"
    with naming(
        f"{folder.location}/{name} is damaged",
        (SafetensorError, ValueError, KeyError, TypeError),
        hint,
    ):
        state = PartState.from_bytes(content)
    if state.identity != identity:
        raise InputError(
            f"{folder.location}/{name} is from a preparation with other settings; choose another output"
        )
    return state


@dataclass(frozen=True)
class Recipe:
    """Settings and facts that all parts of a preparation share."""

    cfg: PrepareConfig
    vocabulary: Vocabulary
    held_out: HeldOut
    identity: str  # sha256 of everything that determines the result


def prepare_part(
    recipe: Recipe, folder: Folder, corpus: Corpus, part: CorpusPart, report: Report
) -> None:
    """Write a part's shards and its state. An unfinished part is continued; a finished one is left unchanged."""
    work = Preparation(recipe, folder, part)
    finished = work.resume()
    report(work.done["source_bytes"], 0)
    if finished:
        return
    documents = islice(corpus.documents(part), work.done["documents"], None)
    for chunk in encoded(documents, recipe.vocabulary):
        work.add(chunk)
        report(sum(document.source_bytes for document in chunk.documents), len(chunk.tokens))
    work.flush(finished=True)


class Preparation:
    """The packing of one part's documents into shards."""

    def __init__(self, recipe: Recipe, folder: Folder, part: CorpusPart) -> None:
        self.folder, self.part, self.identity = folder, part, recipe.identity
        self.vocabulary, self.held_out = recipe.vocabulary, recipe.held_out
        info, dtype, seq_len = self.vocabulary.info, self.vocabulary.dtype, recipe.cfg.seq_len
        self.rows_per_shard = recipe.cfg.rows_per_shard or rows_of_shard(seq_len, dtype)
        starts, first = starts_of(self.vocabulary.open()), part.index * ROWS_APART
        self.packers = {
            split: Packer(
                seq_len,
                info.cls_id,
                info.sep_id,
                starts,
                self.held_out.seed + number,
                dtype,
                first,
            )
            for number, split in enumerate(SPLITS)
        }
        nothing = np.empty(0, np.int32), np.empty(0, np.int64)
        self.pending: dict[str, list[Rows]] = {
            split: [packer.add(*nothing)] for split, packer in self.packers.items()
        }
        self.shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        self.done = {
            "documents": 0,
            "source_bytes": 0,
            "tokens": 0,
            "unknown_tokens": 0,
            "validation_pairs": 0,
        }
        self.done |= dict.fromkeys(corpora_counts(recipe.cfg.corpus), 0)
        self.token_counts = np.zeros(info.vocab_size, np.int64)  # [vocab], in the training split

    def add(self, chunk: Encoded) -> None:
        """Pack a chunk, and write each shard that is then full."""
        shares = np.array([self.held_out.share_of(document) for document in chunk.documents])
        validates = np.array([self.held_out.validates(document) for document in chunk.documents])
        learns = np.array([document.reading.learns(document.text) for document in chunk.documents])
        # tokens at the end of each document
        held_out = np.round(shares * chunk.lengths).astype(np.int64)
        learnt = np.where(learns, chunk.lengths - held_out, 0)
        of_token = np.arange(len(chunk.tokens)) >= np.repeat(
            np.cumsum(chunk.lengths) - held_out, chunk.lengths
        )
        # [tokens]: True if a token that is not held out is learnt
        is_learnt = np.repeat(learns, chunk.lengths)
        # [tokens]: True if a held-out token goes into validation
        is_shown = np.repeat(validates, chunk.lengths)
        for split, (tokens, lengths) in {
            "train": (chunk.tokens[~of_token & is_learnt], learnt),
            "validation": (chunk.tokens[of_token & is_shown], held_out[validates]),
        }.items():
            self.pending[split].append(self.packers[split].add(tokens, lengths))
            if split == "train":
                self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))
        origins = [each.reading for each in chunk.documents]
        if OVERLAP in self.done:
            is_first = np.array([not each.copy for each in origins])
            self.done[OVERLAP] += int(((shares == 1) & ~validates & is_first & learns).sum())
        for each, kept in zip(origins, learnt.tolist(), strict=True):
            if (name := f"{TOKENS_OF}{each.corpus + 1}") in self.done:
                self.done[name] += kept  # 0 for documents of corpus.validation
        self.done["documents"] += len(chunk.documents)
        self.done["source_bytes"] += sum(document.source_bytes for document in chunk.documents)
        self.done["tokens"] += len(chunk.tokens)
        self.done["unknown_tokens"] += chunk.num_dropped
        if self.vocabulary.unk_id is not None:
            self.done["unknown_tokens"] += int((chunk.tokens == self.vocabulary.unk_id).sum())
        if any(sum(map(len, rows)) >= self.rows_per_shard for rows in self.pending.values()):
            self.flush(finished=False)

    def flush(self, *, finished: bool) -> None:
        """Write the pending sequences that fill whole shards (all of them if `finished`), then the state."""
        size, arrays = self.rows_per_shard, {"token_counts": self.token_counts}
        for split, parts in self.pending.items():
            rows = Rows.concatenate(parts)
            whole = len(rows) if finished else len(rows) // size * size
            # Pairs are sequences for sentence-order prediction: both segments are from one document.
            if split == "validation":
                self.done["validation_pairs"] += int(rows.same_document[:whole].sum())
            for first in range(0, whole, size):
                name = shard_name(split, self.part, len(self.shards[split]))
                shard = write_shard(self.folder, name, rows[first : min(first + size, whole)])
                self.shards[split].append(shard)
            rest = Rows.concatenate([rows[whole:]])  # a copy, so that the written rows are freed
            self.pending[split] = [rest]
            tensors = {"stream": self.packers[split].stream, **vars(rest)}
            arrays |= {f"{split}.{name}": tensor for name, tensor in tensors.items()}
        state = PartState(
            identity=self.identity,
            tokenizer=self.vocabulary.info,
            finished=finished,
            shards=self.shards,
            done=self.done,
            next_row={split: packer.next_row for split, packer in self.packers.items()},
            arrays=arrays,
        )
        self.folder.write(state_name(self.part), state.to_bytes())

    def resume(self) -> bool:
        """Continue from the state that an earlier process left, if any. Returns whether the part is finished."""
        state = read_state(self.folder, self.part, self.identity)
        if state is None:
            return False
        self.token_counts, self.done, self.shards = (
            state.arrays["token_counts"].copy(),
            state.done,
            state.shards,
        )
        for split, packer in self.packers.items():
            packer.stream, packer.next_row = state.arrays[f"{split}.stream"], state.next_row[split]
            self.pending[split] = [
                Rows(*(state.arrays[f"{split}.{name}"] for name in ROW_TENSORS))
            ]
        return state.finished


def merge(
    folder: Folder, *, num_parts: int, identity: str, seq_len: int, config: dict[str, Any]
) -> DataManifest:
    """Write the manifest of a preparation whose parts are all finished, and remove the files with their states.

    Raises InputError if parts or shards are missing or from another tokenizer; the message names them. Raises
    UnusableText if a split is shorter than one sequence, or if too many tokens are unknown.
    """
    parts = [CorpusPart(index, num_parts) for index in range(num_parts)]
    states = [read_state(folder, part, identity) for part in parts]
    missing = [
        part
        for part, state in zip(parts, states, strict=True)
        if state is None or not state.finished
    ]
    if missing:
        what = shortlist(f"part {part}" for part in missing)
        raise InputError(
            f"{folder.location}: not finished: {what}; part={missing[0]} continues the first"
        )
    ready = [state for state in states if state is not None]
    info = ready[0].tokenizer
    sha256 = sha256_bytes(folder.read("tokenizer/tokenizer.json"))
    other = [
        f"part {part}"
        for part, state in zip(parts, ready, strict=True)
        if state.tokenizer.sha256 != sha256
    ]
    check(
        not other,
        f"{folder.location}: another tokenizer made {shortlist(other)}; prepare all again",
    )
    splits = {
        split: [shard for state in ready for shard in state.shards[split]] for split in SPLITS
    }
    names = set(folder.names())
    lost = [
        shard.file for shards in splits.values() for shard in shards if shard.file not in names
    ]
    hint = f"remove the {STATE_NAMES}... file of the same number and prepare the part again"
    check(not lost, f"{folder.location}: missing: {shortlist(lost)}; {hint}")
    done = {name: sum(state.done[name] for state in ready) for name in ready[0].done}
    unknown_share(done["unknown_tokens"], done["tokens"], "the tokenizer reads the corpus")
    for split in SPLITS:
        if not splits[split]:
            tokens = sum(len(state.arrays[f"{split}.stream"]) for state in ready)
            more = (
                "add text to corpus.validation" if OVERLAP in done else "raise validation_fraction"
            )
            hint = f"{more} or lower seq_len" if split == "validation" else "add text"
            raise UnusableText(
                f"the {split} split has {tokens} tokens, less than one sequence of {seq_len}; {hint}"
            )
    token_counts = np.sum([state.arrays["token_counts"] for state in ready], 0)
    manifest = write_manifest(
        folder,
        seq_len=seq_len,
        dtype=ready[0].arrays["train.tokens"].dtype.name,
        splits=splits,
        tokenizer=info,
        counts={
            **done,
            "unigram_entropy": unigram_entropy(token_counts, info),
            "neighbour_accuracy": neighbour_accuracy(folder, splits, info),
        },
        config=config,
    )
    remove_states(folder)
    return manifest


def remove_states(folder: Folder) -> None:
    list(at_once(folder.remove, folder.names(STATE_NAMES)))
