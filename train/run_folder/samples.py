"""RUN/samples.json: validation examples with the exported model's answers, for the report. Does not import torch.

The examples contain text from the validation data. A push to the Hub therefore omits the file, and samples=0 writes no
examples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from train.storage.folders import Folder, canonical_json
from train.storage.schema import BadContent, read_object, record

NAME = "samples.json"
MOST_GUESSES = 3  # guesses per answer
MOST_CHARS, MOST_BYTES = 200, 2**20  # characters per text, bytes per file


@dataclass(frozen=True)
class Guess:
    """One of the model's candidate answers."""

    text: str  # empty for the guess that there is no answer
    probability: float | None  # None if the task computes no probabilities


@dataclass(frozen=True)
class Answer:
    """The model's answer to a question whose right answer is known."""

    truth: str  # the right answer; empty if there is none
    guesses: list[Guess]  # the model's answer, then its next best guesses
    score: float  # score of the first guess, from 0 (wrong) to 1 (right)


@dataclass(frozen=True)
class Sample:
    """A text from the validation data, with the model's answers."""

    text: str
    answers: list[Answer]  # one answer, or one for each blank [1], [2], ... in the text
    context: str = ""


@dataclass(frozen=True)
class Samples:
    step: int  # training step of the exported model
    samples: list[Sample] = field(default_factory=list)


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
    samples = record(Samples, read_object(folder.read(NAME)))
    if not all(
        sample.answers and all(answer.guesses for answer in sample.answers)
        for sample in samples.samples
    ):
        raise BadContent("a sample has no answer, or an answer has no guess")
    return samples


def excerpt(text: str, at: int = 0) -> str:
    """Return the part of a text around the index `at`, in one line of at most MOST_CHARS characters."""
    first = min(at - MOST_CHARS // 2, len(text) - MOST_CHARS)
    first = max(0, first)
    last = first + MOST_CHARS
    part = text[first:last]
    if first:
        part = f"...{part[3:]}"
    if last < len(text):
        part = f"{part[:-3]}..."
    return " ".join(part.split())
