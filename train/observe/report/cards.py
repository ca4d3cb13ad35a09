"""The cards at the top of a report: a run's outcome, quality, speed and cost. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from train.config import plural
from train.observe.report.comparison import is_same_work, times
from train.observe.report.data import Records
from train.observe.report.run import Run, divergence, number, settled
from train.observe.report.texts import duration, figure, printable
from train.tasks import TASKS

MOST_CHARS = 300  # maximum length of an outcome's reason
MOST_OTHERS = 3  # maximum number of other metrics on the card of the main metric
TONES = {"done": "good", "failed": "bad", "refused": "bad"}


@dataclass(frozen=True)
class Card:
    value: str
    notes: list[str] = field(default_factory=list)
    # higher is better; compared if the runs did the same work and their titles are equal
    rank: float | None = None
    tone: str = ""  # good | bad
    key: str = ""  # key of the summary value whose ratio to the first run's is shown
    title: str = ""  # replaces the card's name if it is more specific


def cards(run: Run) -> dict[str, Card]:
    """Return a run's cards by name. Unknown facts, and events that did not happen, have no card."""
    made = {name: make(run) for name, make in CARDS.items()}
    return {
        name: replace(card, notes=[note for note in card.notes if note])
        for name, card in made.items()
        if card is not None
    }


def outcome(run: Run) -> Card:
    """Return a card on how far the last attempt got and how it ended. If the run diverged, the card says so."""
    steps, planned = run.summary["steps"], run.summary["steps_total"]
    far = f"step {steps:,}" if planned is None else f"step {steps:,} of {planned:,.0f}"
    far += f" ({steps / planned:.0%})" if planned and steps < planned else ""
    end, reason, tone = "no end recorded", "it is still running, or was killed", ""
    if run.outcome:
        end, reason = (shown(run.outcome[key]) for key in ("outcome", "reason"))
        reason = (
            "stopped early: no later evaluation was better"
            if run.outcome["kind"] == "early_stop"
            else reason
        )
        reason, tone = reason if reason != end else "", TONES.get(end, "")
    lost = divergence(run)
    if lost or run.outcome.get("kind") == "not_finite":
        end, tone = "diverged", "bad"
    return Card(end, [far, lost, reason], tone=tone)


def shown(reason: object) -> str:
    text = printable(" ".join(str(reason).split()))
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}..."


def model(run: Run) -> Card | None:
    """Return a card on the model, with the settings that readers look for first."""
    known, optimizer = run.summary, run.config.get("optim.name")
    if known["model"] is None:
        return None
    name, _, shape = known["model"].partition(", ")
    lr = number(run.config, "optim.lr")
    parameters, batch, seq_len = (
        known[key] for key in ("parameters", "global_batch_size", "seq_len")
    )
    tokens = f" of {seq_len:,.0f} tokens" if seq_len else ""
    notes = [
        shape,
        f"{parameters:,.0f} parameters" if parameters else "",
        f"{plural(batch, 'sequence')}{tokens} per step" if batch else "",
        f"learning rate {lr:g}{f', {shown(optimizer)}' if optimizer else ''}" if lr else "",
    ]
    return Card(shown(name), notes)


def quality(run: Run) -> Card:
    """Return a card with the task's main metric of the exported weights, and comparisons that help to judge it."""
    summary, records = run.summary, run.records or Records()
    scores, spec = summary["scores"], TASKS.get(str(summary["task"]))
    declared = [metric.name for metric in spec.metrics] if spec else []
    wanted = (*declared, str(run.config.get("best.metric")), "loss")
    name = next((name for name in wanted if name in scores), None)
    if name is None:
        return Card("not evaluated")
    (value, step), best = settled(scores[name]), scores[name].get("best")
    is_loss = value is not None and name in ("loss", "mlm_loss")
    notes = [against_entropy(value, summary["unigram_entropy"]) if is_loss else ""]
    if best is not None and best[0] != value:
        which = "exported" if "exported" in scores[name] else "last"
        notes.append(f"best {figure(best[0])} at step {best[1]:,}, {which} at step {step:,}")
    not_its_own = tuple(
        f"{split.name}_" for split in records.evaluated if split.name != "validation"
    )
    others = [
        each for each in scores if (metric := run.metric(each)).sign and metric.is_shown_beside
    ]
    others = [
        each for each in others if each != name and not each.startswith((*not_its_own, "best_"))
    ][:MOST_OTHERS]
    notes.append(
        ", ".join(
            f"{run.metric(each).title} {figure(settled(scores[each])[0])}" for each in others
        )
    )
    notes.append(against_majority(records) if "accuracy" in (name, *others) else "")
    if "masked_accuracy" in scores and (table := summary["neighbour_accuracy"]) is not None:
        notes.append(f"a lookup table of neighbouring tokens predicts {table:.0%} of the tokens")
    metric = run.metric(name)
    title = f"Validation {metric.title}"
    if value is None:
        return Card("no number", notes, tone="bad", title=title)
    return Card(figure(value), notes, metric.sign * value if metric.sign else None, title=title)


def against_entropy(loss: float, entropy: float | None) -> str:
    if entropy is None:
        return ""
    better = "better" if loss <= entropy else "worse"
    words = f"{abs(entropy - loss):.3f} nats {better} than guessing tokens by their frequency"
    return f"{words} (unigram entropy {entropy:.3f})"


def against_majority(records: Records) -> str:
    """Describe the accuracy of always predicting the most frequent label of the validation data."""
    counts = next(
        (split.label_counts for split in records.splits if split.name == "validation"), {}
    )
    total = sum(counts.values())
    return (
        f"accuracy of guessing the most frequent label: {figure(max(counts.values()) / total)}"
        if total
        else ""
    )


def loss(run: Run) -> Card | None:
    lines = run.train
    if not lines:
        return None
    value, validated = run.summary["train_loss"], run.summary["scores"].get("loss")
    first = next((each for each in lines if number(each, "loss") is not None), lines[-1])
    earlier = (
        f"{figure(number(first, 'loss'))} at step {first['step']:,}"
        if first is not lines[-1]
        else ""
    )
    if value is None:
        return Card("no number", ["the last line has no finite loss", earlier], tone="bad")
    notes = [earlier, f"validation {figure(validated['last'][0])}" if validated else ""]
    return Card(figure(value), notes, -value)


def throughput(run: Run) -> Card | None:
    summary, device = run.summary, shown(run.environment.get("device"))
    value, ranks = summary["tokens_per_s"], summary["world_size"]
    if value is None:
        return None
    mfu = "" if summary["mfu"] is None else f"MFU {summary['mfu']:.1%}"
    where = f"{plural(ranks, 'rank')} on {device}, {shown(summary['precision'])}" if ranks else ""
    return Card(f"{value:,.0f}", [mfu, where], value, key="tokens_per_s")


def time_taken(run: Run) -> Card | None:
    seconds, tokens, wall_s = (run.summary[key] for key in ("train_s", "tokens", "wall_s"))
    if not seconds:
        return None
    notes = [f"{tokens:,.0f} tokens" if tokens else ""]
    notes.append("" if wall_s is None else f"{duration(wall_s)} since the first start")
    return Card(duration(seconds), notes, -seconds, key="train_s")


def cost(run: Run) -> Card | None:
    usd, is_partial, instance = (
        run.summary[key] for key in ("cost_usd", "cost_partial", "instance")
    )
    if usd is None:
        return None
    value, notes = (
        f"{'at least ' if is_partial else ''}${usd:,.2f}",
        [shown(instance) if instance else ""],
    )
    return Card(value, notes, None if is_partial else -usd, key="cost_usd")


def faults(run: Run) -> Card | None:
    """Return a card on goodput and faults; None if nothing went wrong."""
    summary = run.summary
    alarms, skipped, rollbacks = (
        summary[key] or 0 for key in ("alarms", "skipped_steps", "rollbacks")
    )
    survived, attempts, goodput = (
        summary["faults_survived"],
        summary["attempts"],
        summary["goodput"],
    )
    if attempts == 1 and not (alarms or skipped or rollbacks):
        return None
    lost = f"{summary['steps_lost']:,} steps lost, {summary['recover_s']:,.1f} s to recover"
    notes = [
        f"{plural(survived, 'fault')} survived: {lost}" if survived else "",
        f"{plural(alarms, 'fault or alarm', 'faults and alarms')}, listed below" if alarms else "",
        plural(attempts, "attempt") if attempts > 1 else "",
        f"{plural(skipped, 'step')} skipped" if skipped else "",
        plural(rollbacks, "rollback") if rollbacks else "",
    ]
    return Card("unknown" if goodput is None else f"{goodput:.1%}", notes, goodput)


CARDS = {  # cards by name, in the page's order
    "Outcome": outcome,
    "Model": model,
    "Final quality": quality,
    "Training loss": loss,
    "Tokens per second": throughput,
    "Training time": time_taken,
    "Cost": cost,
    "Goodput": faults,
}

# ---- several runs --------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A card in the table of several runs."""

    card: Card | None
    ratio: str  # ratio to the first run, in words
    is_best: bool


def side_by_side(runs: Sequence[Run], of_runs: Sequence[dict[str, Card]]) -> dict[str, list[Cell]]:
    """Return a row for each card that any run has. The best value is marked if the runs did the same work."""
    rows, is_ranked = {}, is_same_work(runs)
    for name in CARDS:
        cells = [each.get(name) for each in of_runs]
        keys = [card.key if card else "" for card in cells]
        ratios = [
            times(run, runs[0], key) if key else "" for run, key in zip(runs, keys, strict=True)
        ]
        if any(cells):
            best = best_of(cells) if is_ranked else [False] * len(cells)
            rows[name] = [Cell(*each) for each in zip(cells, ratios, best, strict=True)]
    return rows


def best_of(cells: Sequence[Card | None]) -> list[bool]:
    ranks = [card.rank for card in cells if card is not None and card.rank is not None]
    titles = {card.title for card in cells if card is not None and card.rank is not None}
    is_comparable = len(titles) == 1 and min(ranks) < max(ranks)
    return [is_comparable and card is not None and card.rank == max(ranks) for card in cells]
