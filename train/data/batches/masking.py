"""N-gram masking for whole batches. The mask of a sequence is the same on any rank and in any batch.

ALBERT hides runs of one to three tokens. A run has n tokens with probability p(n) ~ 1/n (section 4.1 of
https://arxiv.org/abs/1909.11942). Of the hidden tokens 80 % become [MASK], 10 % a random token, and 10 % are unchanged
(BERT, https://arxiv.org/abs/1810.04805, section 3.1). Here each sequence is first tiled with runs of random length, so
that lengths follow p(n) exactly. Then runs are hidden in random order until enough tokens are hidden; the last run may
be shortened. (Google's generator draws overlapping candidates and skips those that collide. It masks each copy of the
corpus once; here every epoch draws new masks.)

Shapes: B sequences, S tokens, P slots for predictions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from train.data.random_bits import hash_bits, hash_uniform

IGNORE_INDEX = -100  # torch's cross entropy skips it
NO_WORD = -1
# Indices of a position's random numbers; loader.py uses 4.
LENGTHS, PRIORITY, KIND, REPLACEMENT = range(4)
PLACE = 5


@dataclass(frozen=True)
class Masked:
    input_ids: np.ndarray  # [B, S] int64
    positions: np.ndarray  # [B, P] int64, ascending; 0 in unused slots
    labels: np.ndarray  # [B, P] int64, IGNORE_INDEX in unused slots


@dataclass(frozen=True)
class Masker:
    """A masker of sequences. The mask is a function of (seed, epoch, sequence)."""

    seed: int
    mask_rate: float
    max_predictions: int  # P
    max_ngram: int
    mask_id: int
    special_ids: tuple[int, ...]  # never hidden, never a replacement
    vocab_size: int
    # [vocab] bool: the tokens that begin a word, to hide whole words; None: hide single tokens
    words: np.ndarray | None = None
    special: np.ndarray = field(init=False, repr=False)
    replacements: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        special = np.zeros(self.vocab_size, bool)
        special[list(self.special_ids)] = True
        object.__setattr__(self, "special", special)
        object.__setattr__(self, "replacements", np.flatnonzero(~special))

    def __call__(self, tokens: np.ndarray, epochs: np.ndarray, rows: np.ndarray) -> Masked:
        """Mask `tokens` [B, S], the sequences `rows` [B] as seen in `epochs` [B]."""
        tokens = tokens.astype(np.int64)  # signed, because labels may be IGNORE_INDEX
        seq_len = tokens.shape[1]
        bits = hash_bits(self.seed, epochs[:, None], rows[:, None], np.arange(seq_len))
        candidate = ~self.special[tokens]
        unit = self._units(tokens, candidate)
        order = self._order(unit, candidate, bits)
        budget = self._budget(candidate)
        chosen = order[:, : self.max_predictions]
        used = (np.arange(chosen.shape[1]) < budget) & at(candidate, chosen)
        if self.words is not None:
            chosen, used = whole_words(order, chosen, used, budget, unit, candidate, bits)
        # unused slots come last
        positions = np.sort(np.where(used, chosen, seq_len), axis=1)
        used = positions < seq_len
        positions = np.where(used, positions, 0)
        labels = np.where(used, at(tokens, positions), IGNORE_INDEX)
        hidden = self._hidden(labels, at(bits, positions))
        input_ids = tokens.copy()
        rows_of_used = np.nonzero(used)[0]
        input_ids[rows_of_used, positions[used]] = hidden[used]
        return Masked(input_ids, positions, labels)

    def _order(self, unit: np.ndarray, candidate: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Return the positions in the order in which they are hidden, one more than may be hidden: [B, P + 1 or S].

        All positions of a run have the priority of one of them.
        """
        run_of_unit = self._runs(hash_bits(LENGTHS, state=bits))
        run = at(run_of_unit, unit)
        priority = at(hash_bits(PRIORITY, state=bits), run)
        return first_in_order(priority, candidate, self.max_predictions + 1)

    def _budget(self, candidate: np.ndarray) -> np.ndarray:
        """Return how many tokens are hidden in each sequence, [B, 1]."""
        num_candidates = candidate.sum(1, keepdims=True)
        wanted = np.rint(num_candidates * self.mask_rate).astype(np.int64)
        return wanted.clip(1, self.max_predictions)

    def _hidden(self, labels: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Return what replaces the tokens `labels`: [MASK], a random token, or the token itself."""
        kind = hash_uniform(KIND, state=bits)
        number = hash_uniform(REPLACEMENT, state=bits) * len(self.replacements)
        drawn = self.replacements[number.astype(int)]
        unmasked = np.where(kind < 0.9, drawn, labels)
        return np.where(kind < 0.8, self.mask_id, unmasked)

    def _units(self, tokens: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        """Return the unit (token or word) of each position, [B, S]. Units are numbered from 0 in each sequence."""
        begins = candidate
        if self.words is not None:
            follows_special = np.ones_like(candidate)
            follows_special[:, 1:] = ~candidate[:, :-1]
            begins = candidate & (self.words[tokens] | follows_special)
        units = np.cumsum(begins, axis=1) - 1
        return units.clip(0)

    def _runs(self, bits: np.ndarray) -> np.ndarray:
        """Return the run of each unit, [B, units], numbered like the units. A run has n units with p(n) ~ 1/n."""
        weights = 1.0 / np.arange(1, self.max_ngram + 1)
        shares = np.cumsum(weights / weights.sum())
        lengths = np.ones(bits.shape, np.int64)
        for share in shares[:-1]:
            lengths += bits >= np.uint64(share * 2.0**64)
        # 1 in the first unit of each run but run 0; those beyond the last unit share one more column
        num_units = bits.shape[1]
        first_of_run = np.zeros((len(bits), num_units + 1), np.int64)
        next_run = np.cumsum(lengths, axis=1).clip(max=num_units)
        np.put_along_axis(first_of_run, next_run, 1, axis=1)
        return np.cumsum(first_of_run[:, :-1], axis=1)


def whole_words(
    order: np.ndarray,
    chosen: np.ndarray,
    used: np.ndarray,
    budget: np.ndarray,
    unit: np.ndarray,
    candidate: np.ndarray,
    bits: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return `chosen` and `used` [B, P], changed so that no part of a word is hidden without the rest.

    The word in which the budget ends is left out. If it is the only word, a part of it is hidden, at a random place.
    """
    first = order[:, :1]
    first_word = at(unit, first)
    cut = cut_words(order, budget, unit, candidate)
    is_only = cut == first_word
    is_left_out = ~is_only & (at(unit, chosen) == cut)
    length = (candidate & (unit == first_word)).sum(1, keepdims=True)
    drawn = hash_uniform(PLACE, state=at(bits, first))
    shift = np.where(is_only, drawn * (length - budget + 1), 0)
    return chosen + shift.astype(np.int64), used & ~is_left_out


def cut_words(
    order: np.ndarray, budget: np.ndarray, unit: np.ndarray, candidate: np.ndarray
) -> np.ndarray:
    """Return the word of which only a part is within the budget, NO_WORD if there is none: [B, 1]."""
    seq_len = unit.shape[1]
    last_within = at(order, budget - 1)
    first_beyond = at(order, budget.clip(max=seq_len - 1))
    word = at(unit, last_within)
    goes_on = at(candidate, first_beyond) & (at(unit, first_beyond) == word)
    return np.where(goes_on & (budget < seq_len), word, NO_WORD)


def at(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return `values` [B, S] in the given columns [B, n] of each row."""
    return np.take_along_axis(values, columns, axis=1)


def first_in_order(priority: np.ndarray, candidate: np.ndarray, count: int) -> np.ndarray:
    """Sort positions by `priority` [B, S] uint64, lowest first, and return the first `count`: [B, count or S].

    Equal priorities keep the order of the positions. Positions that are not candidates come last.
    """
    seq_len = priority.shape[1]
    # The low bits become the position, since sorting integers is fast.
    bits = np.uint64((seq_len - 1).bit_length())
    low_bits = (np.uint64(1) << bits) - np.uint64(1)
    keys = np.where(candidate, priority, ~np.uint64(0)) & ~low_bits
    keys |= np.arange(seq_len, dtype=np.uint64)
    if count < seq_len:
        keys = np.partition(keys, count - 1, axis=1)[:, :count]
    keys.sort(axis=1)
    return (keys & low_bits).astype(np.int64)
