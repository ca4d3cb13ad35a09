"""Encoding of documents as token ids by a trained tokenizer. transformers is not imported, so processes start fast."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from train.data.files.errors import naming
from train.data.shards.manifest import TokenizerInfo
from train.data.text.documents import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# characters passed to the tokenizer at a time, which spreads them over its threads
CHUNK_CHARS = 2 * 2**20
CHUNKS_AHEAD = 2  # chunks tokenised while earlier ones are packed
# Forms of tokenizers in tokenizer.json: what changes a character by itself or with its neighbours in a word, what makes
# blanks single spaces, and what splits words there.
LOCAL = {"NFC", "NFKD", "StripAccents", "Lowercase"}
SINGLE_SPACES = [
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    {"type": "Strip", "strip_left": True, "strip_right": True},
]
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in a form that can be sent to another process."""

    json: str  # in the format of the `tokenizers` library
    info: TokenizerInfo
    unk_id: int | None

    def open(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.json)
        tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
        return tokenizer

    @property
    def dtype(self) -> np.dtype:
        return id_dtype(self.info.vocab_size)


def open_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a prepared data set. Raises InputError if it is damaged."""
    with naming(f"tokenizer {folder} cannot be loaded", (Exception,)):
        return Tokenizer.from_file(str(folder / "tokenizer.json"))


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that can represent every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def take_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    """Use bos_token and eos_token as cls_token and sep_token if it has only these, and puts them around a text."""
    tokens = tokenizer.backend_tokenizer.encode("a").tokens or [None]
    if tokenizer.cls_token is None and tokenizer.bos_token == tokens[0]:
        tokenizer.cls_token = tokens[0]
    if tokenizer.sep_token is None and tokenizer.eos_token == tokens[-1]:
        tokenizer.sep_token = tokens[-1]


@dataclass(frozen=True)
class Encoded:
    documents: list[Document]
    tokens: np.ndarray  # int32, the ids of all documents, concatenated
    lengths: np.ndarray  # int64, the token count of each document


def starts_of(tokenizer: Tokenizer) -> np.ndarray:
    """Return [vocab] bool: True for pieces that begin a word (Metaspace, byte-level and WordPiece spelling).

    True for all pieces if none is spelt so, as in a vocabulary of whole words.
    """
    pieces = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    continues = np.array([piece.startswith("##") for piece in pieces])
    if continues.any():
        return ~continues
    starts = np.array([piece.startswith(("▁", "Ġ")) for piece in pieces])
    return starts | ~starts.any()


def chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_CHARS:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def reads_words(form: dict[str, Any]) -> bool:
    """Return whether each word of a text, between spaces, has the ids that it has alone. `form`: as in tokenizer.json.

    False for forms that are not known to do so. Known are BERT's, and that of tokenizers trained here.
    """
    has_phrases = not all(token["special"] for token in form["added_tokens"])
    is_random = bool(form["model"].get("dropout"))  # a word has other ids each time
    rule = form["normalizer"]
    if has_phrases or is_random or rule is None:
        return False
    if rule["type"] == "BertNormalizer":
        return bool(form["pre_tokenizer"] == {"type": "BertPreTokenizer"})
    steps = rule.get("normalizers", [])
    are_local = all(step["type"] in LOCAL or replaces_in_words(step) for step in steps[:-2])
    return form["pre_tokenizer"] == METASPACE and steps[-2:] == SINGLE_SPACES and are_local


def replaces_in_words(step: dict[str, Any]) -> bool:
    """Return whether a step of a normalizer only replaces strings in a word, by strings that divide no words."""
    replaced = step.get("pattern", {}).get("String", " ")
    content = step.get("content", " ")
    return not re.search(r"[\s▁]", replaced + content)


def words_of(text: str) -> list[str]:
    """Return the words of a text, which are empty where there are several spaces."""
    # Metaspace writes a space as ▁. Where the text has that character too, words are not apart.
    if "▁" in text:
        return [text]
    return text.replace("\n", " ").split(" ")


def encode(
    documents: list[Document], tokenizer: Tokenizer, is_text: np.ndarray, *, by_words: bool
) -> Encoded:
    """Encode documents. `is_text` [vocab] bool: the pieces to keep. `by_words`: see `reads_words`."""
    parts = [[document.text] for document in documents]
    if by_words:
        parts = [words_of(document.text) for document in documents]
    # Most words occurred before: each is encoded once.
    distinct = list(dict.fromkeys(chain.from_iterable(parts)))
    encodings = tokenizer.encode_batch_fast(distinct, add_special_tokens=False)
    ids_of = dict(zip(distinct, (encoding.ids for encoding in encodings), strict=True))
    ids = [list(chain.from_iterable(map(ids_of.__getitem__, words))) for words in parts]
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    tokens = np.fromiter(chain.from_iterable(ids), np.int32, lengths.sum())
    keep = is_text[tokens]  # the text "<pad>" may still be encoded as the token
    if not keep.all():
        before = np.concatenate([[0], np.cumsum(keep)])
        ends = np.cumsum(lengths)
        lengths = before[ends] - before[ends - lengths]
        tokens = tokens[keep]
    return Encoded(documents, tokens, lengths)


def encoded(documents: Iterable[Document], vocabulary: Vocabulary) -> Iterator[Encoded]:
    """Yield encoded documents in order, a chunk at a time, while a thread encodes the next chunks."""
    tokenizer = vocabulary.open()
    info = vocabulary.info
    source = chunks(documents)
    is_text = np.ones(info.vocab_size, bool)
    # only packing inserts these
    is_text[[info.cls_id, info.sep_id, info.mask_id, info.pad_id]] = False
    by_words = reads_words(json.loads(vocabulary.json))
    act = partial(encode, tokenizer=tokenizer, is_text=is_text, by_words=by_words)
    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(act, chunk) for chunk in islice(source, CHUNKS_AHEAD)]
        while pending:
            yield pending.pop(0).result()
            pending += [pool.submit(act, chunk) for chunk in islice(source, 1)]
