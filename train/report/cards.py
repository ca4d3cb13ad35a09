"""What a report leads with: how a run ended, how good its model is, how fast it was and what it cost. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from train.config import lower_is_better
from train.report.comparison import times
from train.report.data import Records
from train.report.run import HIGHER_IS_BETTER, Run, Summary, number
from train.report.texts import duration, figure, plural, printable, spoken
from train.tasks import TASKS

ENDS = ("done", "early_stop")
MOST_CHARS = 300  # of a reason
# A masked language model that is no better than this against the unigram entropy uses little context.
FREQUENCIES_NATS = 1.0
MOST_WRONG = 0.5  # share of right answers below which most are wrong
MOST_NATS = 20.0  # so that what is not a loss prints no long number
MOST_OTHERS = 3  # further metrics on the card of the headline
NAMES = {  # of the cards, in their order, as rows of a comparison
    "outcome": "Outcome",
    "quality": "Final quality",
    "loss": "Training loss",
    "throughput": "Tokens per second",
    "time": "Training time",
    "cost": "Cost",
    "faults": "Goodput",
}


@dataclass(frozen=True)
class Card:
    title: str
    value: str
    notes: list[str] = field(default_factory=list)
    rank: float | None = None  # the higher the better, among runs for which `title` and `basis` are the same
    basis: object = None  # None: runs cannot be compared by this card
    tone: str = ""  # good | bad
    key: str = ""  # of the summary's figure whose ratio to that of the first run is shown


def cards(run: Run, records: Records | None) -> dict[str, Card]:
    """The cards of a run by their names; what is not known, or did not happen, has none."""
    summary = run.summary
    made = {
        "outcome": outcome(run, summary),
        "quality": quality(run, summary, records),
        "loss": loss(run, summary),
        "throughput": throughput(run, summary),
        "time": time_taken(summary),
        "cost": cost(summary),
        "faults": faults(summary),
    }
    return {name: card for name, card in made.items() if card is not None}


def outcome(run: Run, summary: Summary) -> Card:
    """How the last attempt ended, by outcome.json or else by its last line, and how far the run came."""
    steps, total = summary["steps"], summary["steps_total"]
    far = f"step {steps:,}" if total is None else f"step {steps:,} of {total:,.0f}"
    far += f" ({steps / total:.0%})" if total and steps < total else ""
    end = run.outcome
    if end is not None:
        reason = "stopped early: no evaluation was better any more" if end.kind == "early_stop" else end.reason
        tone = {"done": "good", "failed": "bad", "refused": "bad"}.get(end.outcome, "")
        return Card(
            "Outcome", shown(end.outcome), [far, *([shown(reason)] if reason != end.outcome else [])], tone=tone
        )
    if summary["attempts_without_summary"] and run.attempts[-1][-1]["kind"] != "summary":
        return Card("Outcome", "no end recorded", [far, "it is still running, or was killed"])
    reason = shown(summary["reason"])
    if reason in ENDS:
        return Card("Outcome", "done", [far, *(["stopped early"] if reason != "done" else [])], tone="good")
    return Card("Outcome", "stopped", [far, reason])


def shown(reason: object) -> str:
    text = printable(" ".join(str(reason).split()))
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}..."


def quality(run: Run, summary: Summary, records: Records | None) -> Card:
    """The last value of the task's most telling metric, with what tells whether that is good."""
    scores, spec = summary["scores"], TASKS.get(str(summary["task"]))
    wanted = (*(spec.headline if spec else ()), str(run.config.get("best.metric")), "loss")
    name = next((name for name in wanted if name in scores), None)
    if name is None:
        return Card(NAMES["quality"], "not evaluated")
    (value, step), best = scores[name]["last"], scores[name].get("best")
    is_loss = value is not None and name in ("loss", "mlm_loss")
    notes = [against_entropy(value, summary["unigram_entropy"])] if is_loss else []
    if best is not None and best[0] != value:
        notes.append(f"best {figure(best[0])} at step {best[1]:,}, last at step {step:,}")
    others = [each for each in scores if HIGHER_IS_BETTER.search(each) or each == "perplexity"]
    further = [split.name for split in records.evaluated if split.name != "validation"] if records else []
    not_its_own = tuple(f"{split}_" for split in (*further, "best"))
    others = [each for each in others if each != name and not each.startswith(not_its_own)][:MOST_OTHERS]
    notes.append(", ".join(f"{spoken(each)} {figure(scores[each]['last'][0])}" for each in others))
    notes.append(against_majority(records) if "accuracy" in (name, *others) else "")
    notes = [note for note in notes if note]
    if value is None:
        return Card(f"Validation {spoken(name)}", "no number", notes, tone="bad")
    sign = -1 if lower_is_better(name) else 1 if HIGHER_IS_BETTER.search(name) else None
    rank = None if sign is None else sign * value
    return Card(f"Validation {spoken(name)}", figure(value), notes, rank, basis=lesson(run, summary))


def against_entropy(loss: float, entropy: float | None) -> str:
    if entropy is None:
        return ""
    better = "better" if loss <= entropy else "worse"
    words = f"{abs(entropy - loss):.3f} nats {better} than guessing tokens by their frequency"
    return f"{words} (unigram entropy {entropy:.3f})"


def ability(summary: Summary) -> str:
    """What to expect of a masked language model that fills in blanks, by how much better than the frequencies of tokens
    it predicts them; empty if that is not known.
    """
    scores, entropy = summary["scores"], summary["unigram_entropy"]
    loss, right = (scores.get(name, {}).get("last", (None,))[0] for name in ("loss", "masked_accuracy"))
    loss = scores["mlm_loss"]["last"][0] if "mlm_loss" in scores else loss
    if loss is None or right is None or entropy is None or not 0 <= right <= 1:
        return ""
    choices, by_frequency = (math.exp(min(each, MOST_NATS)) for each in (loss, entropy))
    said = (
        f"It puts the right piece first in {right:.0%} of the blanks, and is as unsure as between {choices:,.0f} "
        f"equally likely pieces; their frequencies alone leave {by_frequency:,.0f}."
    )
    if entropy - loss < FREQUENCIES_NATS:
        said += (
            " So it knows which pieces are frequent ('.', 'the', endings of words) and little of what goes with what: "
        )
        return (
            said
            + "most answers below are wrong. It is a start for fine-tuning or more training, not a source of answers."
        )
    if right < MOST_WRONG:
        said += " So it knows word forms and common phrases; do not expect rare words or facts."
    return said


def against_majority(records: Records | None) -> str:
    """The accuracy of always giving the label that is most frequent in the validation data."""
    counts = next((split.label_counts for split in records.splits if split.name == "validation"), {}) if records else {}
    total = sum(counts.values())
    return f"always the most frequent label: accuracy {figure(max(counts.values()) / total)}" if total else ""


def lesson(run: Run, summary: Summary) -> str:
    """The same for runs whose losses and metrics mean the same: of one task, on the same data."""
    return str((summary["task"], summary["unigram_entropy"], run.environment.get("identity.data")))


def loss(run: Run, summary: Summary) -> Card | None:
    lines = run.lines["train"]
    if not lines:
        return None
    value = summary["train_loss"]
    first = next((each for each in lines if number(each, "loss") is not None), None)
    notes = [f"{figure(number(first, 'loss'))} at step {first['step']:,}"] if first and first is not lines[-1] else []
    if value is None:
        return Card(NAMES["loss"], "unknown", ["the last line holds no finite number", *notes], tone="bad")
    validated = summary["scores"].get("loss")
    notes += [f"validation {figure(validated['last'][0])}"] if validated else []
    return Card(NAMES["loss"], figure(value), notes, -value, basis=lesson(run, summary))


def throughput(run: Run, summary: Summary) -> Card | None:
    value, ranks = summary["tokens_per_s"], summary["world_size"]
    if value is None:
        return None
    mfu = [] if summary["mfu"] is None else [f"MFU {summary['mfu']:.1%}"]
    end = run.lines["summary"][-1] if run.lines["summary"] else {}
    device = end.get("device") or run.environment.get("device") or summary["backend"]
    where = (
        [f"{ranks:,.0f} rank{'s' if ranks > 1 else ''} on {shown(device)}, {shown(summary['precision'])}"]
        if ranks
        else []
    )
    return Card(NAMES["throughput"], f"{value:,.0f}", [*mfu, *where], value, basis="tokens/s", key="tokens_per_s")


def time_taken(summary: Summary) -> Card | None:
    seconds, tokens = summary["train_s"], summary["tokens"]
    notes = [f"{tokens:,.0f} tokens"] if tokens else []
    notes += [f"{duration(summary['wall_s'])} since the first start"] if summary["wall_s"] is not None else []
    if not seconds:
        return None
    # A run that did less took less time.
    return Card(NAMES["time"], duration(seconds), notes, -seconds, basis=summary["examples"], key="train_s")


def cost(summary: Summary) -> Card | None:
    usd = summary["cost_usd"]
    if usd is None:
        return None
    value = f"{'at least ' if summary['cost_partial'] else ''}${usd:,.2f}"
    notes = [shown(summary["instance"])] if summary["instance"] else []
    basis = None if summary["cost_partial"] else summary["examples"]
    return Card(NAMES["cost"], value, notes, -usd, basis=basis, key="cost_usd")


def faults(summary: Summary) -> Card | None:
    """Goodput, if anything went wrong."""
    counted = {name: summary[name] or 0 for name in ("alarms", "skipped_steps", "rollbacks")}
    if summary["attempts"] == 1 and not any(counted.values()):
        return None
    lost = f"{summary['steps_lost']:,} steps lost, {summary['recover_s']:,.1f} s to recover"
    notes = [
        f"{plural(summary['faults_survived'], 'fault')} survived: {lost}" if summary["faults_survived"] else "",
        f"{plural(counted['alarms'], 'fault or alarm', 'faults and alarms')}, listed below"
        if counted["alarms"]
        else "",
        plural(summary["attempts"], "attempt") if summary["attempts"] > 1 else "",
        f"{plural(counted['skipped_steps'], 'step')} skipped" if counted["skipped_steps"] else "",
        plural(counted["rollbacks"], "rollback") if counted["rollbacks"] else "",
    ]
    goodput = summary["goodput"]
    value = "unknown" if goodput is None else f"{goodput:.1%}"
    return Card(NAMES["faults"], value, [note for note in notes if note], goodput, basis="goodput")


# ---- several runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardRow:
    """One card of each run."""

    name: str
    cells: list[Card | None]
    best: list[bool]
    ratios: list[str]  # to the first run


def side_by_side(runs: Sequence[Run], of_runs: Sequence[dict[str, Card]]) -> list[CardRow]:
    """A row for each card that a run has, with the best value marked where the runs can be compared by it. `of_runs`:
    the cards of each run.
    """
    rows = []
    for name, title in NAMES.items():
        cells = [each.get(name) for each in of_runs]
        keys = [card.key if card is not None else "" for card in cells]
        ratios = [times(run, runs[0], key) if key else "" for run, key in zip(runs, keys, strict=True)]
        if any(cells):
            rows.append(CardRow(title, cells, best_of(cells), ratios))
    return rows


def best_of(cells: Sequence[Card | None]) -> list[bool]:
    known = [card for card in cells if card is not None and card.rank is not None and card.basis is not None]
    ranks = [card.rank for card in known if card.rank is not None]
    is_comparable = len({(card.title, card.basis) for card in known}) == 1 and min(ranks) < max(ranks)
    return [is_comparable and card in known and card is not None and card.rank == max(ranks) for card in cells]
