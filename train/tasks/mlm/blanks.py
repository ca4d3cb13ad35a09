"""Validation sequences with blanks, and what a masked language model fills in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from train.data.batches.masking import IGNORE_INDEX
from train.data.text.encoding import starts_of
from train.run_folder.samples import MOST_CHARS, Answer, Guess, Sample, excerpt

MOST_BLANKS = 4  # of a sample
TOKENS_BEFORE = 12  # the first of them


@dataclass(frozen=True)
class Blank:
    position: int  # in the sequence
    token: int  # that was there
    guesses: list[tuple[int, float]]  # tokens with their probabilities, the highest first


def blanks_of(positions: Tensor, labels: Tensor, guesses: Tensor, shares: Tensor) -> list[Blank]:
    """The blanks of a sequence: their positions and tokens [P], the guesses and their probabilities [P, n]."""
    pairs = (list(zip(*pair, strict=True)) for pair in zip(guesses.tolist(), shares.tolist(), strict=True))
    blanks = zip(positions.tolist(), labels.tolist(), pairs, strict=True)
    return [Blank(*blank) for blank in blanks if blank[1] != IGNORE_INDEX]


class Spelling:
    """Tokens as text, by the tokenizer of a prepared data set."""

    def __init__(self, folder: Path, *, mask_id: int, special_ids: Sequence[int]) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.starts = starts_of(self.tokenizer)
        self.mask_id, self.hidden = mask_id, set(special_ids) - {mask_id}

    def piece(self, token: int) -> str:
        text = self.tokenizer.decode([token]).strip() or self.tokenizer.id_to_token(token) or f"token {token}"
        return excerpt(text)

    def sample(self, tokens: np.ndarray, blanks: Sequence[Blank]) -> Sample:
        """The part of a sequence [S] around its first blanks."""
        first = max(0, blanks[0].position - TOKENS_BEFORE)
        last = blanks[MOST_BLANKS].position if len(blanks) > MOST_BLANKS else len(tokens)
        while True:
            known = [blank for blank in blanks[:MOST_BLANKS] if blank.position < last]
            text = self.text(tokens[first:last], known)
            if len(text) <= MOST_CHARS:
                return Sample(text, [self.answer(blank) for blank in known])
            first, last = min(first + 1, blanks[0].position), last - 1

    def text(self, tokens: np.ndarray, blanks: Sequence[Blank]) -> str:
        """Text with its masks numbered: [1], [2], ..."""
        ids = [token for token in tokens.tolist() if token not in self.hidden]
        mask = self.tokenizer.id_to_token(self.mask_id)
        begin, *others = self.tokenizer.decode(ids, skip_special_tokens=False).split(mask)
        spaces = [" " if self.starts[blank.token] else "" for blank in blanks]
        parts = [f"{space}[{number}]{part}" for number, (space, part) in enumerate(zip(spaces, others, strict=True), 1)]
        return " ".join((begin + "".join(parts)).split())

    def answer(self, blank: Blank) -> Answer:
        guesses = [Guess(self.piece(token), min(1.0, share)) for token, share in blank.guesses]
        return Answer(self.piece(blank.token), guesses, float(blank.guesses[0][0] == blank.token))
