"""`python -m train.prepare`: text to token shards (read, split, learn a tokenizer, tokenise, pack, write).

The same text, settings and seed give the same bytes. Killed, it goes on after the last complete shard; `manifest.json`
is written last, so a folder without it is unfinished and one with it is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from train import cli
from train.config import InputError, PrepareConfig, check, to_dict
from train.data.corpus import Corpus, Document, open_corpus
from train.data.packing import Packer, Rows
from train.data.shards import FORMAT, SPLITS, Manifest, Shard, read_manifest, write_manifest, write_shard
from train.data.tokenizer import chunks, load_tokenizer, save_tokenizer, tokenised, train_tokenizer, word_starts
from train.storage import canonical_json, local_path, make_folder, write_atomic


def main() -> int:
    return cli.run(PrepareConfig, run)


def run(cfg: PrepareConfig) -> int:
    manifest = prepare(cfg)
    counts = manifest.counts
    print(
        f"{cfg.output}: {manifest.rows('train'):,} training and {manifest.rows('validation'):,} validation sequences "
        f"of {manifest.seq_len} tokens, vocabulary {manifest.tokenizer.vocab_size:,}, "
        f"unigram entropy {counts['unigram_entropy']:.3f} nats, id {manifest.id[:12]}"
    )
    return cli.DONE


def prepare(cfg: PrepareConfig) -> Manifest:
    """Prepare a corpus, or go on with it, or find it done. Raises InputError and leaves no manifest if it cannot."""
    folder = make_folder(local_path(cfg.output))
    corpus = open_corpus(cfg.corpus)
    if claim(folder, fingerprint(cfg, corpus)):
        return read_manifest(folder)
    tokenizer = tokenizer_of(cfg, corpus, folder)
    work = Preparation(cfg, folder, tokenizer)
    work.resume()
    documents = iter(corpus.documents())
    with tqdm(
        total=corpus.total_bytes, unit="B", unit_scale=True, desc="tokenise and pack", disable=None, mininterval=0.5
    ) as bar:
        for document in islice(documents, work.done["documents"]):
            bar.update(document.source_bytes)
        seen = work.done["tokens"]
        for chunk, ids in tokenised(chunks(documents), tokenizer):
            work.add(chunk, ids)
            bar.update(sum(document.source_bytes for document in chunk))
            elapsed_s = bar.format_dict["elapsed"] or 1
            bar.set_postfix_str(f"{(work.done['tokens'] - seen) / elapsed_s:,.0f} tokens/s", refresh=False)
    return work.finish()


def fingerprint(cfg: PrepareConfig, corpus: Corpus) -> dict[str, Any]:
    """All that decides the result; what two calls must share for one to go on with the other's work."""
    return {"settings": settings_of(cfg), "input": corpus.fingerprint(), "format": FORMAT}


def settings_of(cfg: PrepareConfig) -> dict[str, Any]:
    """The settings that make the data what it is: not where it lies, nor where the text lay."""
    settings = to_dict(cfg)
    del settings["output"]
    settings["corpus"].pop("path", None)
    return settings


def claim(folder: Path, wanted: dict[str, Any]) -> bool:
    """Mark the folder as this preparation's; True if it is finished already. InputError if it is another's."""
    path = folder / "source.json"
    if not path.is_file():
        others = [item.name for item in folder.iterdir()]
        check(not others, f"output={folder} is not empty and not a preparation ({others[:3]}); choose another folder")
        write_atomic(path, canonical_json(wanted))
        return False
    found = json.loads(path.read_bytes())
    if found == json.loads(canonical_json(wanted)):
        return (folder / "manifest.json").is_file()
    if (folder / "manifest.json").exists() or (folder / "progress.safetensors").exists():
        raise InputError(
            f"output={folder} holds a preparation with other settings ({difference(found, wanted)}); "
            "choose another output or remove the folder"
        )
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # nothing but a tokenizer was made: start over
    write_atomic(path, canonical_json(wanted))
    return False


def difference(old: Any, new: Any, key: str = "") -> str:
    """The first setting in which two fingerprints differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                return difference(old.get(name), new.get(name), f"{key}.{name}".removeprefix(".settings."))
    return "the corpus has changed" if key == ".input" else f"{key.lstrip('.')}: {old} there, {new} here"


def digest(text: str, seed: int) -> tuple[float, float]:
    """Two numbers in [0, 1) that are a function of the text alone: equal documents land in the same split."""
    raw = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16, key=str(seed).encode()).digest()
    return int.from_bytes(raw[:8], "big") / 2**64, int.from_bytes(raw[8:], "big") / 2**64


def tokenizer_of(cfg: PrepareConfig, corpus: Corpus, folder: Path) -> PreTrainedTokenizerFast:
    """The folder's tokenizer; made first if it is not there yet."""
    final = folder / "tokenizer"
    if not final.is_dir():
        if cfg.tokenizer.pretrained is not None:
            tokenizer = load_tokenizer(cfg.tokenizer.pretrained)
        else:
            tokenizer = train_tokenizer(
                training_texts(cfg, corpus),
                vocab_size=cfg.tokenizer.vocab_size,
                lowercase=cfg.tokenizer.lowercase,
                train_bytes=cfg.tokenizer.train_bytes,
            )
        temporary = folder / ".tokenizer.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        save_tokenizer(tokenizer, temporary)
        temporary.rename(final)
    return load_tokenizer(str(final))


def training_texts(cfg: PrepareConfig, corpus: Corpus) -> Iterator[str]:
    """Training documents for the tokenizer.

    All of them, or an even sample when the corpus is larger than what the tokenizer reads; of a stream whose size
    nobody knows, the first ones.
    """
    share = min(1.0, cfg.tokenizer.train_bytes / corpus.total_bytes) if corpus.total_bytes else 1.0
    found = False
    with tqdm(total=corpus.total_bytes, unit="B", unit_scale=True, desc="read for tokenizer", disable=None) as bar:
        for document in corpus.documents():
            found = True
            bar.update(document.source_bytes)
            split_at, sample_at = digest(document.text, cfg.seed)
            if split_at >= cfg.validation_fraction and sample_at < share:
                yield document.text
    check(found, f"the corpus ({cfg.corpus.kind}) holds no text at all")


class Preparation:
    """Documents' ids in, shards out; `progress.safetensors` holds all that a later process needs to go on."""

    def __init__(self, cfg: PrepareConfig, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.cfg, self.folder = cfg, folder
        self.tokenizer = tokenizer
        dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
        starts = word_starts(folder / "tokenizer")
        self.packers = {
            split: Packer(cfg.seq_len, tokenizer.cls_token_id, tokenizer.sep_token_id, starts, cfg.seed + place, dtype)
            for place, split in enumerate(SPLITS)
        }
        self.pending: dict[str, list[Rows]] = {split: [packer.add([])] for split, packer in self.packers.items()}
        self.shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        self.done = {"documents": 0, "source_bytes": 0, "tokens": 0, "unknown_tokens": 0}
        self.empty = np.empty(0, np.int64)
        self.token_counts = np.zeros(len(tokenizer), np.int64)  # of the training split

    def add(self, chunk: list[Document], ids: list[np.ndarray]) -> None:
        """Pack a chunk; write each shard that is full."""
        splits: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for document, document_ids in zip(chunk, ids, strict=True):
            held_out = digest(document.text, self.cfg.seed)[0] < self.cfg.validation_fraction
            splits[SPLITS[held_out]].append(document_ids)
        for split, documents in splits.items():
            self.pending[split].append(self.packers[split].add(documents))
        counts = np.bincount(np.concatenate([self.empty, *splits["train"]]), minlength=len(self.token_counts))
        self.token_counts += counts
        self.done["documents"] += len(chunk)
        self.done["source_bytes"] += sum(document.source_bytes for document in chunk)
        self.done["tokens"] += sum(map(len, ids))
        if self.tokenizer.unk_token_id is not None:
            self.done["unknown_tokens"] += int(counts[self.tokenizer.unk_token_id])
        if self.flush(full_only=True):
            self.save_progress()

    def flush(self, *, full_only: bool) -> bool:
        """Write waiting sequences as shards; True if any was written."""
        before = sum(map(len, self.shards.values()))
        size = self.cfg.rows_per_shard
        for split, parts in self.pending.items():
            if full_only and sum(map(len, parts)) < size:
                continue
            rows = Rows.concatenate(parts)
            while len(rows) >= size or (len(rows) and not full_only):
                self.shards[split].append(write_shard(self.folder, split, len(self.shards[split]), rows[:size]))
                rows = rows[size:]
            self.pending[split] = [rows]
        return sum(map(len, self.shards.values())) > before

    def save_progress(self) -> None:
        arrays = {"token_counts": self.token_counts}
        for split, packer in self.packers.items():
            rows = Rows.concatenate(self.pending[split])
            arrays |= {f"{split}.stream": packer.stream, f"{split}.tokens": rows.tokens}
            arrays |= {f"{split}.pivot": rows.pivot, f"{split}.same_document": rows.same_document}
        state = {
            "done": self.done,
            "num_rows": {split: packer.num_rows for split, packer in self.packers.items()},
            "shards": {split: [asdict(shard) for shard in shards] for split, shards in self.shards.items()},
        }
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        write_atomic(self.folder / "progress.safetensors", save(contiguous, {"state": json.dumps(state)}))

    def resume(self) -> None:
        """Take up the work of a killed preparation, if there is any."""
        path = self.folder / "progress.safetensors"
        if not path.is_file():
            return
        with safe_open(path, framework="numpy") as file:
            state = json.loads(file.metadata()["state"])
            self.token_counts = file.get_tensor("token_counts")
            for split, packer in self.packers.items():
                packer.stream, packer.num_rows = file.get_tensor(f"{split}.stream"), state["num_rows"][split]
                names = ("tokens", "pivot", "same_document")
                self.pending[split] = [Rows(*(file.get_tensor(f"{split}.{name}") for name in names))]
                self.shards[split] = [Shard(**shard) for shard in state["shards"][split]]
        self.done = state["done"]
        print(f"going on after {self.done['documents']:,} documents, {sum(map(len, self.shards.values()))} shards")

    def finish(self) -> Manifest:
        """Write what is left and the manifest. InputError if a split has not one whole sequence."""
        waiting = {split: sum(map(len, parts)) for split, parts in self.pending.items()}
        for split in SPLITS:
            total = waiting[split] + sum(shard.rows for shard in self.shards[split])
            tokens = len(self.packers[split].stream)
            hint = "raise validation_fraction or lower seq_len" if split == "validation" else "give more text"
            if self.done["documents"] < 10:
                hint = f"the text is {self.done['documents']} documents, which are not divided: set corpus.separator"
            size = self.cfg.seq_len
            check(total > 0, f"the {split} part has {tokens} tokens, less than one sequence of {size}; {hint}")
        self.flush(full_only=False)
        predicted = np.delete(self.token_counts, self.tokenizer.all_special_ids)  # <unk> is never asked for
        share = predicted[predicted > 0] / max(1, predicted.sum())
        manifest = write_manifest(
            self.folder,
            seq_len=self.cfg.seq_len,
            dtype=self.packers["train"].dtype.name,
            splits=self.shards,
            tokenizer=save_tokenizer(self.tokenizer, self.folder / "tokenizer"),
            counts={**self.done, "unigram_entropy": round(float(-(share * np.log(share)).sum()), 6)},
            config=settings_of(self.cfg),
        )
        (self.folder / "progress.safetensors").unlink(missing_ok=True)
        return manifest


if __name__ == "__main__":
    sys.exit(main())
