"""The cards at the top of a report: a run's outcome, quality, speed and cost. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from train.config import plural
from train.observe.report.data import Records
from train.observe.report.run import Run, divergence, number, settled
from train.observe.report.texts import duration, figure, printable, share
from train.tasks import TASKS

MOST_CHARS = 300  # maximum length of an outcome's reason
MOST_OTHERS = 3  # maximum number of other metrics on the card of the main metric
TONES = {"done": "good", "failed": "bad", "refused": "bad", "diverged": "bad"}


@dataclass(frozen=True)
class Card:
    value: str
    notes: list[str] = field(default_factory=list)
    tone: str = ""  # good | bad
    title: str = ""  # replaces the card's name if it is more specific


def cards(run: Run) -> dict[str, Card]:
    """Return a run's cards by name. Unknown facts, and events that did not happen, have no card."""
    found = {}
    for name, make in CARDS.items():
        card = make(run)
        if card is not None:
            found[name] = replace(card, notes=[note for note in card.notes if note])
    return found


def outcome(run: Run) -> Card:
    """Return a card on how far the last attempt got and how it ended. If the run diverged, the card says so."""
    steps, planned = run.summary["steps"], run.summary["steps_total"]
    far = f"step {steps:,}"
    if planned is not None:
        far += f" of {planned:,.0f}"
    if planned and steps < planned:
        far += f" ({steps / planned:.0%})"
    end, reason = ending(run)
    return Card(end, [far, divergence(run), reason], TONES.get(end, ""))


def ending(run: Run) -> tuple[str, str]:
    """Return in a word how the last attempt ended, and the reason; "" if the word says it all."""
    if not run.outcome:
        end, reason = "no end recorded", "it is still running, or was killed"
    else:
        end, reason = shown(run.outcome["outcome"]), shown(run.outcome["reason"])
        if run.outcome["kind"] == "early_stop":
            reason = "stopped early: no later evaluation was better"
    if divergence(run) or run.outcome.get("kind") == "not_finite":
        end = "diverged"
    if reason == end:
        reason = ""
    return end, reason


def shown(reason: object) -> str:
    text = printable(" ".join(str(reason).split()))
    if len(text) > MOST_CHARS:
        text = f"{text[:MOST_CHARS]}..."
    return text


def model(run: Run) -> Card | None:
    """Return a card on the model, with the settings that readers look for first."""
    known = run.summary
    if known["model"] is None:
        return None
    name, _, shape = known["model"].partition(", ")
    notes = [shape]
    if known["parameters"]:
        notes.append(f"{known['parameters']:,.0f} parameters")
    if known["global_batch_size"] and known["seq_len"]:
        batch = plural(known["global_batch_size"], "sequence")
        notes.append(f"{batch} of {known['seq_len']:,.0f} tokens per step")
    if lr := number(run.config, "optim.lr"):
        notes.append(f"learning rate {lr:g}, {shown(run.config.get('optim.name', 'unknown'))}")
    return Card(shown(name), notes)


def quality(run: Run) -> Card:
    """Return a card with the task's main metric of the exported weights, and comparisons that help to judge it."""
    summary, scores, spec = run.summary, run.summary["scores"], TASKS.get(str(run.summary["task"]))
    if spec:
        declared = [metric.name for metric in spec.metrics]
    else:
        declared = []
    wanted = [*declared, str(run.config.get("best.metric")), "loss"]
    name = next((name for name in wanted if name in scores), None)
    if name is None:
        return Card("not evaluated")
    value, step = settled(scores[name])
    best, best_step = scores[name].get("best", (value, step))
    notes = []
    if value is not None and name in ("loss", "mlm_loss"):
        notes.append(against_entropy(value, summary["unigram_entropy"]))
    if best != value:
        which = "exported" if "exported" in scores[name] else "last"
        notes.append(f"best {figure(best)} at step {best_step:,}, {which} at step {step:,}")
    others = [each for each in declared if each in scores and run.metric(each).is_shown_beside]
    others = [each for each in others if each != name][:MOST_OTHERS]
    texts = [f"{run.metric(each).title} {figure(settled(scores[each])[0])}" for each in others]
    notes.append(", ".join(texts))
    if "accuracy" in (name, *others):
        notes.append(against_majority(run.records or Records()))
    tone = "bad" if value is None else ""
    return Card(figure(value), notes, tone, title=f"Validation {run.metric(name).title}")


def against_entropy(loss: float, entropy: float | None) -> str:
    if entropy is None:
        return ""
    better = "better" if loss <= entropy else "worse"
    words = f"{abs(entropy - loss):.3f} nats {better} than guessing tokens by their frequency"
    return f"{words} (unigram entropy {entropy:.3f})"


def against_majority(records: Records) -> str:
    """Describe the accuracy of always predicting the most frequent label of the validation data."""
    for split in records.splits:
        total = sum(split.label_counts.values())
        if split.name == "validation" and total:
            guessed = figure(max(split.label_counts.values()) / total)
            return f"accuracy of guessing the most frequent label: {guessed}"
    return ""


def throughput(run: Run) -> Card | None:
    known = run.summary
    if known["tokens_per_s"] is None:
        return None
    notes = []
    if known["mfu"] is not None:
        notes.append(f"MFU {known['mfu']:.1%}")
    if known["world_size"]:
        where = f"{plural(known['world_size'], 'rank')} on {shown(known['device'])}"
        notes.append(f"{where}, {shown(known['precision'])}")
    return Card(f"{known['tokens_per_s']:,.0f}", notes)


def time_taken(run: Run) -> Card | None:
    known = run.summary
    if not known["train_s"]:
        return None
    notes = []
    if known["tokens"]:
        notes.append(f"{known['tokens']:,.0f} tokens")
    if known["wall_s"]:
        notes.append(f"{duration(known['wall_s'])} since the first start")
    return Card(duration(known["train_s"]), notes)


def cost(run: Run) -> Card | None:
    usd, instance = run.summary["cost_usd"], run.summary["instance"]
    if usd is None:
        return None
    text = f"${usd:,.2f}"
    if run.summary["cost_partial"]:
        text = f"at least {text}"
    return Card(text, [shown(instance or "")])


def goodput(run: Run) -> Card | None:
    """Return a card on goodput and faults; None if nothing went wrong."""
    known = run.summary
    notes = []
    if known["attempts"] > 1:
        notes.append(plural(known["attempts"], "attempt"))
    if known["steps_lost"]:
        notes.append(f"{plural(known['steps_lost'], 'step')} lost")
    if known["alarms"]:
        words = plural(known["alarms"], "fault or alarm", "faults and alarms")
        notes.append(f"{words}, listed below")
    if not notes:
        return None
    return Card(share(known["goodput"]), notes)


CARDS = {  # cards by name, in the page's order
    "Outcome": outcome,
    "Model": model,
    "Final quality": quality,
    "Tokens per second": throughput,
    "Training time": time_taken,
    "Cost": cost,
    "Goodput": goodput,
}
