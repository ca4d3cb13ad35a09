"""Token shards from the parts of a corpus, and their manifest. An interrupted part resumes after its last shard."""

from __future__ import annotations

import json
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
from train.data.text.encoding import Encoded, Vocabulary, encoded, id_dtype, starts_of
from train.data.text.guessing import neighbour_accuracy, unigram_entropy
from train.data.text.packing import Packer
from train.storage.folders import Folder, at_once, sha256_bytes
from train.storage.schema import read_object, record

SHARD_BYTES = 64 * 2**20  # the size of a shard unless rows_per_shard is set
# The distance between the first sequence indices of two parts, so that their random cuts differ.
ROWS_APART = 2**40
STATE_NAMES = "part-"  # prefix of the files with the parts' states
# A larger corpus is not read twice to measure it: random choice is precise enough.
MOST_WEIGHED_CHARS = 64 * 2**20
TOKENS_OF = "train_tokens_"  # prefix of a count's name, before the number of the corpus (from 1)

# Called with the bytes of text processed since the previous call.
Report = Callable[[int], None]


@dataclass(frozen=True)
class HeldOut:
    """The rule that holds out documents for validation: those whose hash is low.

    With corpus.validation, the documents in it, and no others, are held out.
    """

    seed: int
    below: float = 0.0  # the hash below which documents are held out
    known: frozenset[float] | None = None  # hashes of the documents of corpus.validation

    def has(self, text: str) -> bool:
        number = text_uniform(text, self.seed)[0]
        if self.known is not None:
            return number in self.known
        return number < self.below

    def split_of(self, document: Document) -> str | None:
        """Return the split of a document; None if it is in neither. The validation split has each text only once."""
        reading = document.reading
        if not self.has(document.text):
            return "train"
        if self.known is None:
            is_validated = reading.copy == 0
        else:
            is_validated = reading.is_validation
        return "validation" if is_validated else None


def choose_held_out(corpus: Corpus, fraction: float, seed: int) -> HeldOut:
    """Return the rule that holds out `fraction` of the characters of a corpus.

    In a corpus that is small enough to measure, the documents with the lowest hashes have this share. Repeated readings
    are not measured. With corpus.validation, nothing else is held out.
    """
    texts = corpus.validation()
    if texts is not None:
        hashes = frozenset(text_uniform(document.text, seed)[0] for document in texts)
        return HeldOut(seed, known=hashes)
    # No encoding has characters of more than 4 bytes.
    if (corpus.total_bytes or 0) > 4 * MOST_WEIGHED_CHARS:
        return HeldOut(seed, fraction)
    found: list[tuple[float, int]] = []
    total = 0
    for document in corpus.documents():
        if document.reading.copy:
            continue
        found.append((text_uniform(document.text, seed)[0], len(document.text)))
        total += len(document.text)
        if total > MOST_WEIGHED_CHARS:
            return HeldOut(seed, fraction)
    found.sort()
    sums = np.cumsum([0, *(size for _, size in found)])
    count = int(np.abs(sums - fraction * total).argmin())
    return HeldOut(seed, found[count][0] if count < len(found) else 1.0)


def corpora_counts(cfg: CorpusConfig) -> list[str]:
    """Return the names of the counts of training tokens of each of several corpora."""
    if len(cfg.sources) == 1:
        return []
    return [f"{TOKENS_OF}{number}" for number in range(1, len(cfg.sources) + 1)]


def label(part: CorpusPart) -> str:
    return f"{part.index + 1:0{len(str(part.count))}}of{part.count}"


def state_name(part: CorpusPart) -> str:
    return f"{STATE_NAMES}{label(part)}.safetensors"


def shard_name(split: str, part: CorpusPart, index: int) -> str:
    """Return train-00000.safetensors, or train-03of64-00000.safetensors if there are several parts."""
    if part.count == 1:
        return f"{split}-{index:05d}.safetensors"
    return f"{split}-{label(part)}-{index:05d}.safetensors"


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
    # Arrays of numpy: token_counts, and each split's tokens and sequences that are not in a shard.
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
    path = f"{folder.location}/{name}"
    unreadable = (SafetensorError, ValueError, KeyError, TypeError)
    with naming(f"{path} is damaged", unreadable, "; remove it and prepare the part again"):
        state = PartState.from_bytes(content)
    says = f"{path} is from a preparation with other settings; choose another output"
    check(state.identity == identity, says)
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
    report(work.done["source_bytes"])
    if finished:
        return
    documents = islice(corpus.documents(part), work.done["documents"], None)
    for chunk in encoded(documents, recipe.vocabulary):
        work.add(chunk)
        report(sum(document.source_bytes for document in chunk.documents))
    work.flush(finished=True)


class Preparation:
    """The packing of one part's documents into shards."""

    def __init__(self, recipe: Recipe, folder: Folder, part: CorpusPart) -> None:
        self.folder, self.part, self.identity = folder, part, recipe.identity
        self.vocabulary, self.held_out = recipe.vocabulary, recipe.held_out
        info, dtype = self.vocabulary.info, self.vocabulary.dtype
        seq_len = recipe.cfg.seq_len
        self.rows_per_shard = recipe.cfg.rows_per_shard or rows_of_shard(seq_len, dtype)
        word_starts = starts_of(self.vocabulary.open())
        self.packers = {
            split: Packer(
                seq_len=seq_len,
                cls_id=info.cls_id,
                sep_id=info.sep_id,
                word_start=word_starts,
                seed=self.held_out.seed + number,
                dtype=dtype,
                next_row=part.index * ROWS_APART,
            )
            for number, split in enumerate(SPLITS)
        }
        nothing = np.empty(0, np.int32), np.empty(0, np.int64)
        self.pending: dict[str, list[Rows]] = {
            split: [packer.add(*nothing)] for split, packer in self.packers.items()
        }
        self.shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        counts = ["documents", "source_bytes", "tokens", "unknown_tokens", "validation_pairs"]
        counts += corpora_counts(recipe.cfg.corpus)
        self.done = dict.fromkeys(counts, 0)
        self.token_counts = np.zeros(info.vocab_size, np.int64)  # [vocab], in the training split

    def add(self, chunk: Encoded) -> None:
        """Pack a chunk, and write each shard that is then full."""
        split_of = [self.held_out.split_of(document) for document in chunk.documents]
        for split in SPLITS:
            is_in = np.array([each == split for each in split_of])
            tokens = chunk.tokens[np.repeat(is_in, chunk.lengths)]
            self.pending[split].append(self.packers[split].add(tokens, chunk.lengths[is_in]))
            if split == "train":
                self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))
        self.count(chunk, split_of)
        if any(sum(map(len, rows)) >= self.rows_per_shard for rows in self.pending.values()):
            self.flush(finished=False)

    def count(self, chunk: Encoded, split_of: list[str | None]) -> None:
        done = self.done
        done["documents"] += len(chunk.documents)
        done["source_bytes"] += sum(document.source_bytes for document in chunk.documents)
        done["tokens"] += len(chunk.tokens)
        if self.vocabulary.unk_id is not None:
            done["unknown_tokens"] += int((chunk.tokens == self.vocabulary.unk_id).sum())
        documents = zip(chunk.documents, split_of, chunk.lengths.tolist(), strict=True)
        for document, split, num_tokens in documents:
            of_corpus = f"{TOKENS_OF}{document.reading.corpus + 1}"
            if split == "train" and of_corpus in done:
                done[of_corpus] += num_tokens

    def flush(self, *, finished: bool) -> None:
        """Write the pending sequences that fill whole shards (all of them if `finished`), then the state."""
        size = self.rows_per_shard
        arrays = {"token_counts": self.token_counts}
        for split, parts in self.pending.items():
            rows = Rows.concatenate(parts)
            if finished:
                whole = len(rows)
            else:
                whole = len(rows) // size * size
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
        self.token_counts = state.arrays["token_counts"].copy()
        self.done, self.shards = state.done, state.shards
        for split, packer in self.packers.items():
            packer.stream = state.arrays[f"{split}.stream"]
            packer.next_row = state.next_row[split]
            tensors = [state.arrays[f"{split}.{name}"] for name in ROW_TENSORS]
            self.pending[split] = [Rows(*tensors)]
        return state.finished


def merge(
    folder: Folder, *, num_parts: int, identity: str, seq_len: int, config: dict[str, Any]
) -> DataManifest:
    """Write the manifest of a preparation whose parts are all finished, and remove the files with their states.

    Raises InputError if parts are missing or from another tokenizer; the message names them. Raises UnusableText if a
    split is shorter than one sequence, or if too many tokens are unknown.
    """
    states = finished_states(folder, num_parts, identity)
    info = next(iter(states.values())).tokenizer
    splits = {
        split: [shard for state in states.values() for shard in state.shards[split]]
        for split in SPLITS
    }
    sha256 = sha256_bytes(folder.read("tokenizer/tokenizer.json"))
    other = [f"part {part}" for part, state in states.items() if state.tokenizer.sha256 != sha256]
    says = f"another tokenizer made {shortlist(other)}; prepare all again"
    check(not other, f"{folder.location}: {says}")
    counts: dict[str, float] = {}
    for name in next(iter(states.values())).done:
        counts[name] = sum(state.done[name] for state in states.values())
    unknown_share(counts["unknown_tokens"], counts["tokens"], "the tokenizer reads the corpus")
    for split in SPLITS:
        if not splits[split]:
            tokens = sum(len(state.arrays[f"{split}.stream"]) for state in states.values())
            hint = "add text, raise validation_fraction or lower seq_len"
            what = f"the {split} split has {tokens} tokens, less than one sequence of {seq_len}"
            raise UnusableText(f"{what}; {hint}")
    token_counts = np.sum([state.arrays["token_counts"] for state in states.values()], 0)
    counts["unigram_entropy"] = unigram_entropy(token_counts, info)
    counts["neighbour_accuracy"] = neighbour_accuracy(folder, splits, info)
    manifest = write_manifest(
        folder,
        seq_len=seq_len,
        dtype=id_dtype(info.vocab_size).name,
        splits=splits,
        tokenizer=info,
        counts=counts,
        config=config,
    )
    remove_states(folder)
    return manifest


def finished_states(folder: Folder, num_parts: int, identity: str) -> dict[CorpusPart, PartState]:
    """Return the states of all parts. Raises InputError, which names them, if some are not finished."""
    states = {}
    missing = []
    for index in range(num_parts):
        part = CorpusPart(index, num_parts)
        state = read_state(folder, part, identity)
        if state is None or not state.finished:
            missing.append(part)
        else:
            states[part] = state
    if missing:
        what = shortlist(f"part {part}" for part in missing)
        how = f"part={missing[0]} continues the first"
        raise InputError(f"{folder.location}: not finished: {what}; {how}")
    return states


def remove_states(folder: Folder) -> None:
    list(at_once(folder.remove, folder.names(STATE_NAMES)))
