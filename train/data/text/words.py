"""The starts of words in a sequence of tokens, found from the tokens' pieces because shards store no word ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import decoders

from train.data.text.encoding import open_tokenizer, starts_of


@dataclass(frozen=True)
class WordEdges:
    """Pieces that always begin a word (`begins`), and pieces after which a word begins (`ends`), both [V] bool."""

    begins: np.ndarray
    ends: np.ndarray


def word_edges(folder: Path) -> WordEdges:
    """Return the word edges for a prepared data set. They agree with its tokenizer's word ids, with one exception.

    If a byte-level tokenizer splits 't into ' and t, the word ids count one word, and the edges two.
    """
    tokenizer = open_tokenizer(folder)
    begins = starts_of(tokenizer)
    pieces = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    model, splitter = json.loads(tokenizer.to_str())["model"], tokenizer.pre_tokenizer
    if model["type"] == "WordLevel":
        return WordEdges(np.ones_like(begins), np.zeros_like(begins))
    if suffix := model.get("end_of_word_suffix"):
        return WordEdges(
            np.zeros_like(begins), np.array([piece.endswith(suffix) for piece in pieces])
        )
    if model["type"] == "WordPiece" or splitter is None:
        return WordEdges(begins, np.zeros_like(begins))
    bytes_of, is_bytes = decoders.ByteLevel(), any(piece.startswith("Ġ") for piece in pieces)

    def splits(left: str, right: str) -> bool:
        return any(begin == len(left) for _, (begin, _) in splitter.pre_tokenize_str(left + right))

    ends = np.zeros_like(begins)
    for number, piece in enumerate(pieces):
        if is_bytes:
            text = bytes_of.decode([piece])
        else:
            text = piece.replace("▁", " ")
        if text and "\ufffd" not in text:  # skip pieces that are only some bytes of a character
            begins[number] |= splits("x", text)
            ends[number] = not text.isspace() and splits(text, "x")
    return WordEdges(begins, ends)
