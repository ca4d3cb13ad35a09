"""Token shards from the parts of a corpus, and their manifest. An interrupted part starts over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from train.config import InputError, PrepareConfig, check, shortlist
from train.data.files.errors import naming
from train.data.random_bits import text_uniform
from train.data.shards.format import Rows, write_shard
from train.data.shards.manifest import SPLITS, DataManifest, Shard, TokenizerInfo, write_manifest
from train.data.text.corpus import Corpus
from train.data.text.coverage import unknown_share
from train.data.text.documents import CorpusPart, Document
from train.data.text.encoding import Encoded, Vocabulary, encoded, id_dtype, starts_of
from train.data.text.guessing import neighbour_accuracy, unigram_entropy
from train.data.text.packing import Packer
from train.storage.folders import Folder, at_once, canonical_json, sha256_bytes
from train.storage.schema import read_object, record

SHARD_BYTES = 64 * 2**20  # the size of a shard unless rows_per_shard is set
# The distance between the first sequence indices of two parts, so that their random cuts differ.
ROWS_APART = 2**40
READS = "the tokenizer reads the corpus"
STATE_NAMES = "part-"  # prefix of the files with the parts' states
# A larger corpus is not read twice to measure it: random choice is precise enough.
MOST_WEIGHED_CHARS = 64 * 2**20

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
    limits = [*(number for number, _ in found), 1.0]
    sums = np.cumsum([0, *(size for _, size in found)])
    count = int(np.abs(sums - fraction * total).argmin())
    return HeldOut(seed, limits[count])


def label(part: CorpusPart) -> str:
    return f"{part.index + 1:0{len(str(part.count))}}of{part.count}"


def state_name(part: CorpusPart) -> str:
    return f"{STATE_NAMES}{label(part)}.json"


def shard_name(split: str, part: CorpusPart, index: int) -> str:
    """Return train-00000.safetensors, or train-03of64-00000.safetensors if there are several parts."""
    if part.count == 1:
        return f"{split}-{index:05d}.safetensors"
    return f"{split}-{label(part)}-{index:05d}.safetensors"


@dataclass(frozen=True)
class PartState:
    """The result of a finished part, which the merge reads."""

    identity: str  # the identity of the preparation (see Recipe)
    tokenizer: TokenizerInfo
    shards: dict[str, list[Shard]]
    done: dict[str, int]  # documents, source_bytes, tokens, unknown_tokens, ...
    left: dict[str, int]  # each split's tokens that fill no sequence
    token_counts: list[int]  # [vocab], in the training split


def read_state(folder: Folder, part: CorpusPart, identity: str) -> PartState | None:
    """Return a part's state; None if it is not finished. Raises InputError if it is damaged or of other settings."""
    name = state_name(part)
    try:
        content = folder.read(name)
    except FileNotFoundError:
        return None
    path = f"{folder.location}/{name}"
    with naming(f"{path} is damaged", (), "; remove it and prepare the part again"):
        state: PartState = record(PartState, read_object(content))
    check(
        state.identity == identity,
        f"{path} is from a preparation with other settings; choose another output",
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
    """Write a part's shards and then its state. A finished part is left unchanged; another one starts over."""
    state = read_state(folder, part, recipe.identity)
    if state is not None:
        report(state.done["source_bytes"])
        return
    work = Preparation(recipe, folder, part)
    for chunk in encoded(corpus.documents(part), recipe.vocabulary):
        work.add(chunk)
        report(sum(document.source_bytes for document in chunk.documents))
    work.finish()


class Preparation:
    """The packing of one part's documents into shards."""

    def __init__(self, recipe: Recipe, folder: Folder, part: CorpusPart) -> None:
        self.folder = folder
        self.part = part
        self.identity = recipe.identity
        self.vocabulary = recipe.vocabulary
        self.held_out = recipe.held_out
        info = self.vocabulary.info
        dtype = self.vocabulary.dtype
        seq_len = recipe.cfg.seq_len
        # 3: pivot and same_document
        row_bytes = seq_len * dtype.itemsize + 3
        self.rows_per_shard = recipe.cfg.rows_per_shard or max(1, SHARD_BYTES // row_bytes)
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
        # sequences that are not in a shard
        self.pending: dict[str, list[Rows]] = {split: [] for split in SPLITS}
        self.shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        counts = ["documents", "source_bytes", "tokens", "unknown_tokens", "validation_pairs"]
        self.done = dict.fromkeys(counts, 0)
        self.token_counts = np.zeros(info.vocab_size, np.int64)  # [vocab], in the training split

    def add(self, chunk: Encoded) -> None:
        """Pack a chunk, and write each shard that is then full.

        Raises InputError if too many of the tokens so far are unknown.
        """
        split_of = [self.held_out.split_of(document) for document in chunk.documents]
        self.count(chunk)
        for split in SPLITS:
            is_in = np.array([each == split for each in split_of])
            tokens = chunk.tokens[np.repeat(is_in, chunk.lengths)]
            rows = self.packers[split].add(tokens, chunk.lengths[is_in])
            self.pending[split].append(rows)
            if split == "train":
                self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))
            else:
                # Pairs are sequences for sentence-order prediction: both segments are from one document.
                self.done["validation_pairs"] += int(rows.same_document.sum())
            if sum(map(len, self.pending[split])) >= self.rows_per_shard:
                unknown_share(self.done["unknown_tokens"], self.done["tokens"], READS)
                self.write_shards(split)

    def count(self, chunk: Encoded) -> None:
        done = self.done
        done["documents"] += len(chunk.documents)
        done["source_bytes"] += sum(document.source_bytes for document in chunk.documents)
        done["tokens"] += len(chunk.tokens)
        if self.vocabulary.unk_id is not None:
            done["unknown_tokens"] += int((chunk.tokens == self.vocabulary.unk_id).sum())

    def write_shards(self, split: str, *, finished: bool = False) -> None:
        """Write the pending sequences that fill whole shards, or all of them if `finished`."""
        size = self.rows_per_shard
        rows = Rows.concatenate(self.pending[split])
        whole = len(rows)
        if not finished:
            whole -= len(rows) % size
        for first in range(0, whole, size):
            name = shard_name(split, self.part, len(self.shards[split]))
            shard = write_shard(self.folder, name, rows[first : min(first + size, whole)])
            self.shards[split].append(shard)
        rest = Rows.concatenate([rows[whole:]])  # a copy, so that the written rows are freed
        self.pending[split] = [rest]

    def finish(self) -> None:
        """Write the last shards and the state."""
        for split, pending in self.pending.items():
            if pending:
                self.write_shards(split, finished=True)
        state = PartState(
            identity=self.identity,
            tokenizer=self.vocabulary.info,
            shards=self.shards,
            done=self.done,
            left={split: len(packer.stream) for split, packer in self.packers.items()},
            token_counts=self.token_counts.tolist(),
        )
        self.folder.write(state_name(self.part), canonical_json(asdict(state)))


def merge(
    folder: Folder, *, num_parts: int, identity: str, seq_len: int, config: dict[str, Any]
) -> DataManifest:
    """Write the manifest of a preparation whose parts are all finished, and remove the files with their states.

    Raises InputError if parts are missing or from another tokenizer (the message names them), if a split is shorter
    than one sequence, or if too many tokens are unknown.
    """
    states = finished_states(folder, num_parts, identity)
    check_one_tokenizer(folder, states)
    info = next(iter(states.values())).tokenizer
    splits = {
        split: [shard for state in states.values() for shard in state.shards[split]]
        for split in SPLITS
    }
    counts: dict[str, float] = {}
    for name in next(iter(states.values())).done:
        counts[name] = sum(state.done[name] for state in states.values())
    unknown_share(counts["unknown_tokens"], counts["tokens"], READS)
    for split in SPLITS:
        if not splits[split]:
            tokens = sum(state.left[split] for state in states.values())
            raise InputError(
                f"the {split} split has {tokens} tokens, less than one sequence of {seq_len}; add text, raise "
                "validation_fraction or lower seq_len"
            )
    token_counts = np.sum([state.token_counts for state in states.values()], 0)
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


def check_one_tokenizer(folder: Folder, states: dict[CorpusPart, PartState]) -> None:
    """Raise InputError, which names the parts, unless the folder's tokenizer made all of them."""
    sha256 = sha256_bytes(folder.read("tokenizer/tokenizer.json"))
    other = [f"part {part}" for part, state in states.items() if state.tokenizer.sha256 != sha256]
    check(
        not other,
        f"{folder.location}: another tokenizer made {shortlist(other)}; prepare all again",
    )


def finished_states(folder: Folder, num_parts: int, identity: str) -> dict[CorpusPart, PartState]:
    """Return the states of all parts. Raises InputError, which names them, if some are not finished."""
    states = {}
    missing = []
    for index in range(num_parts):
        part = CorpusPart(index, num_parts)
        state = read_state(folder, part, identity)
        if state is None:
            missing.append(part)
        else:
            states[part] = state
    if missing:
        what = shortlist(f"part {part}" for part in missing)
        raise InputError(
            f"{folder.location}: not finished: {what}; part={missing[0]} continues the first"
        )
    return states


def remove_states(folder: Folder) -> None:
    list(at_once(folder.remove, folder.names(STATE_NAMES)))
