"""RUN/samples.json: validation examples with the exported model's answers, for the report. It does not import torch.

The examples contain text from the validation data. A push to the Hub therefore omits the file, and samples=0 writes no
examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from train.config.train import MAX_SAMPLES
from train.system.folders import Folder, canonical_json
from train.system.schema import BadContent, read_object, record

NAME = "samples.json"
MOST_ANSWERS, MOST_GUESSES = 8, 3  # answers per sample, guesses per answer
MOST_CHARS, MOST_BYTES = 200, 2**20  # characters per text, bytes per file


@dataclass(frozen=True)
class Guess:
    """An answer that the model considers."""

    text: str  # empty for the guess that there is no answer
    probability: float | None  # None if the task computes no probabilities

    def __post_init__(self) -> None:
        check_limits(0 if self.probability is None else self.probability, self.text)


@dataclass(frozen=True)
class Answer:
    """The model's answer to a question whose right answer is known."""

    truth: str  # the right answer; empty if there is none
    guesses: list[Guess]  # the model's answer, then its next best guesses
    score: float  # score of the first guess, from 0 (wrong) to 1 (right)

    def __post_init__(self) -> None:
        check_limits(self.score, self.truth)
        check_number(self.guesses, 1, MOST_GUESSES)


@dataclass(frozen=True)
class Sample:
    """A text that the model read, with its answers."""

    text: str
    answers: list[Answer]  # one answer, or one for each blank [1], [2], ... in the text
    context: str = ""

    def __post_init__(self) -> None:
        check_limits(0, self.text, self.context)
        check_number(self.answers, 1, MOST_ANSWERS)


@dataclass(frozen=True)
class Samples:
    step: int  # training step of the exported model
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_number(self.samples, 0, MAX_SAMPLES)


def check_limits(share: float, *texts: str) -> None:
    """Raise BadContent if a number is not from 0 to 1 or a text is too long."""
    if not 0 <= share <= 1:  # rejects NaN too
        raise BadContent(f"{share} is not a number from 0 to 1")
    for text in texts:
        if len(text) > MOST_CHARS:
            raise BadContent(f"a text has {len(text):,} characters, more than {MOST_CHARS}")


def check_number(items: Sequence[object], least: int, most: int) -> None:
    if not least <= len(items) <= most:
        raise BadContent(f"a list has {len(items)} items instead of {least} to {most}")


def write(folder: Folder, samples: Samples) -> None:
    """Write the samples, replacing an earlier export's file. If there are no samples, remove the file."""
    if samples.samples:
        folder.write(NAME, canonical_json(asdict(samples)))
    elif folder.size(NAME) is not None:
        folder.remove(NAME)


def read(folder: Folder) -> Samples | None:
    """Return the samples in a run folder; None without the file. Raises BadContent if the file is invalid."""
    size = folder.size(NAME)
    if size is None:
        return None
    if size > MOST_BYTES:
        raise BadContent(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
    return record(Samples, read_object(folder.read(NAME)))


def excerpt(text: str, at: int = 0) -> str:
    """Return the part of a text around the index `at`, in one line of at most MOST_CHARS characters."""
    first = max(0, min(at - MOST_CHARS // 2, len(text) - MOST_CHARS))
    last = first + MOST_CHARS
    head, tail = "..." if first else "", "..." if last < len(text) else ""
    return " ".join((head + text[first + len(head) : last - len(tail)] + tail).split())
