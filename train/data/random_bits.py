"""Random numbers that are a pure function of their coordinates, computed for a whole array at a time.

The number at (seed, epoch, sequence, position) is the same on every rank, in every worker and batch. Masks and random
cuts therefore do not depend on how work is split, and there is no generator state to save.
"""

from __future__ import annotations

import hashlib

import numpy as np

# SplitMix64's increment and finaliser: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014,
# https://doi.org/10.1145/2714064.2660195; constants of variant 13 in https://prng.di.unimi.it/splitmix64.c
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
# the coordinate after the seed in the draw of validation rows; other draws have a split's index
EVAL_STREAM = 2**20


def mix(value: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers, so that each input bit flips each output bit with probability one half."""
    value = (value ^ (value >> np.uint64(30))) * MULTIPLIER_1
    value = (value ^ (value >> np.uint64(27))) * MULTIPLIER_2
    return value ^ (value >> np.uint64(31))


def hash_bits(*coordinates: int | np.ndarray, state: np.ndarray | int = 0) -> np.ndarray:
    """Return 64 random bits (uint64) per point of the broadcast coordinates. `state`: bits for earlier coordinates."""
    state = np.atleast_1d(np.asarray(state, np.uint64))
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        for coordinate in coordinates:
            state = mix(state + GOLDEN * (np.asarray(coordinate).astype(np.uint64) + np.uint64(1)))
    return state


def hash_uniform(*coordinates: int | np.ndarray, state: np.ndarray | int = 0) -> np.ndarray:
    """Return uniform float64 numbers in [0, 1), from the bits of `hash_bits`."""
    return (hash_bits(*coordinates, state=state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_rows(num_rows: int, most: int, *coordinates: int) -> np.ndarray:
    """Return at most `most` distinct row indices below `num_rows`, ascending. The coordinates determine the draw."""
    if most >= num_rows:
        return np.arange(num_rows)
    order = np.argsort(hash_uniform(*coordinates, np.arange(num_rows)), kind="stable")
    return np.sort(order[:most])


def text_uniform(text: str, seed: int) -> tuple[float, float]:
    """Return two numbers in [0, 1) that depend only on the text and the seed: equal texts are put in the same split."""
    raw = hashlib.blake2b(
        text.encode(errors="surrogatepass"), digest_size=16, key=str(seed).encode()
    ).digest()
    return int.from_bytes(raw[:8], "big") / 2**64, int.from_bytes(raw[8:], "big") / 2**64
