"""The last step of a preparation: from the states of its parts to the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from train.config import InputError, check
from train.data.shards.format import SPLITS, Manifest, Shard, TokenizerInfo, write_manifest
from train.data.text.documents import Part
from train.data.text.preparation import STATE_NAMES, read_state
from train.storage.folders import Folder, sha256_bytes

MOST_NAMED = 8  # parts in a message


class TooLittleText(InputError):
    """A split would have no sequence. No other part or second try would change it."""


def merge(folder: Folder, *, num_parts: int, identity: str, seq_len: int, config: dict[str, Any]) -> Manifest:
    """Write the manifest of a preparation whose parts are all there, and remove what they kept for a restart.

    Raises:
        InputError: parts or shards are missing, or of another tokenizer; the message names them.
        TooLittleText: a split has not one whole sequence.
    """
    parts = [Part(index, num_parts) for index in range(num_parts)]
    states = [read_state(folder, part, identity) for part in parts]
    missing = [part for part, state in zip(parts, states, strict=True) if state is None or not state.finished]
    if missing:
        what = listed([f"part {part}" for part in missing])
        raise InputError(f"{folder.location}: {what} not finished; part={missing[0]} continues the first")
    ready = [state for state in states if state is not None]
    info = ready[0].tokenizer
    sha256 = sha256_bytes(folder.read("tokenizer/tokenizer.json"))
    other = [f"part {part}" for part, state in zip(parts, ready, strict=True) if state.tokenizer.sha256 != sha256]
    check(not other, f"{folder.location}: the tokenizer of {listed(other)} not the published one; prepare all again")
    splits = {split: [shard for state in ready for shard in state.shards[split]] for split in SPLITS}
    check_there(folder, [shard for shards in splits.values() for shard in shards])
    names = set.intersection(*(set(state.done) for state in ready))  # an earlier version counted less
    done = {name: sum(state.done[name] for state in ready) for name in ready[0].done if name in names}
    for split in SPLITS:
        tokens = sum(len(state.arrays[f"{split}.stream"]) for state in ready)
        check_size(split, sum(shard.rows for shard in splits[split]), tokens, seq_len)
    token_counts = np.sum([state.arrays["token_counts"] for state in ready], 0)
    manifest = write_manifest(
        folder,
        seq_len=seq_len,
        dtype=ready[0].arrays["train.tokens"].dtype.name,
        splits=splits,
        tokenizer=info,
        counts={**done, "unigram_entropy": unigram_entropy(token_counts, info)},
        config=config,
    )
    remove_states(folder)
    return manifest


def check_there(folder: Folder, shards: list[Shard]) -> None:
    names = set(folder.names())
    lost = [shard.file for shard in shards if shard.file not in names]
    hint = f"remove the {STATE_NAMES}... file of the same number and prepare the part again"
    check(not lost, f"{folder.location}: {listed(lost)} gone; {hint}")


def listed(names: Sequence[str]) -> str:
    """ "part 3/64, part 5/64 and 12 more are"."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"


def check_size(split: str, num_rows: int, tokens: int, seq_len: int) -> None:
    if num_rows:
        return
    hint = "raise validation_fraction or lower seq_len" if split == "validation" else "give more text"
    raise TooLittleText(f"the {split} part has {tokens} tokens, less than one sequence of {seq_len}; {hint}")


def unigram_entropy(counts: np.ndarray, info: TokenizerInfo) -> float:
    """Nats a token, of the tokens [vocab] that can be asked for (<unk> and other special ones never are)."""
    predicted = np.delete(counts, info.special_ids)
    share = predicted[predicted > 0] / max(1, predicted.sum())
    return round(float(-(share * np.log(share)).sum()), 6)


def remove_states(folder: Folder) -> None:
    for name in folder.names(STATE_NAMES):
        folder.remove(name)
