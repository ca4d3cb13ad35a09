"""What a report leads with: the cards of a run and of several, the order of its sections, and samples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import finished_run
import pytest
from reported_runs import (
    eval_line,
    fault_line,
    shown,
    summary_line,
    train_line,
    whole_run,
    write_run,
)

from train.config import InputError
from train.observe.report import cards, page
from train.observe.report.figures import panels
from train.observe.report.run import read_run
from train.run_folder.outcome import Outcome, write_outcome
from train.storage.folders import LocalFolder

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

ANSWER = {"truth": "good", "score": 0.0, "guesses": [{"text": "bad", "probability": 0.75}]}
SAMPLE: dict[str, Any] = {"text": "a [1] text", "context": "", "answers": [ANSWER]}


def cards_of(run: Path) -> dict[str, cards.Card]:
    return cards.cards(read_run(run))


def beside(*folders: Path) -> dict[str, list[cards.Cell]]:
    return cards.side_by_side(
        [read_run(folder) for folder in folders], [cards_of(folder) for folder in folders]
    )


def made(folder: Path, lines: list[dict[str, Any]], **changes: Any) -> dict[str, cards.Card]:
    return cards_of(write_run(folder, lines, **changes))


# ---- cards of a run ------------------------------------------------------------------------------------------------


def test_a_pretraining_leads_with_its_loss_against_the_unigram_entropy(tmp_path):
    lead = made(tmp_path / "run", whole_run(mfu=0.4321, cost_usd=1.5))
    names = [
        "Outcome",
        "Model",
        "Final quality",
        "Training loss",
        "Tokens per second",
        "Training time",
        "Cost",
    ]
    assert list(lead) == names
    shape = [
        "2 layers, hidden size 64",
        "123,456 parameters",
        "32 sequences of 64 tokens per step",
    ]
    assert (lead["Model"].value, lead["Model"].notes) == (
        "albert",
        [*shape, "learning rate 0.001, adamw"],
    )
    assert (lead["Final quality"].title, lead["Final quality"].value) == (
        "Validation loss",
        "5.000",
    )
    assert lead["Final quality"].notes[0].startswith("2.500 nats better than guessing")
    assert lead["Final quality"].notes[1] == "perplexity 32.00, masked accuracy 0.400"
    assert (lead["Training loss"].value, lead["Training loss"].notes[0]) == (
        "5.000",
        "8.000 at step 10",
    )
    assert (lead["Tokens per second"].value, lead["Tokens per second"].notes[0]) == (
        "4,096",
        "MFU 43.2%",
    )
    assert (lead["Training time"].value, lead["Cost"].value) == ("0:00:20", "$1.50")
    begun = {"model": {"architecture": "albert", "init_from": "runs/demo"}}
    tuned = made(tmp_path / "tuned", whole_run(), config=begun)
    assert (tuned["Model"].value, tuned["Model"].notes) == (
        "runs/demo",
        shape[1:] + lead["Model"].notes[-1:],
    )
    counted = made(tmp_path / "counted", whole_run(), environment={"neighbour_accuracy": 0.26})
    assert (
        counted["Final quality"]
        .notes[-1]
        .startswith("a lookup table of neighbouring tokens predicts 26%")
    )
    ordered = [train_line(10), eval_line(10, mlm_loss=8.5), summary_line(10, 10)]
    # the loss of the tokens, without that of the order
    quality = made(tmp_path / "sop", ordered)["Final quality"]
    assert (quality.title, quality.value) == ("Validation mlm loss", "8.500")
    assert quality.notes[0].startswith("1.000 nats worse than guessing")


def test_goodput_leads_only_after_faults_and_what_is_unknown_has_no_card_or_says_so(tmp_path):
    lead = made(tmp_path / "run", [train_line(10), train_line(20, loss=None)])
    assert "Cost" not in lead and "Goodput" not in lead
    assert (lead["Training loss"].value, lead["Training loss"].tone) == ("no number", "bad")
    assert lead["Final quality"].value == "not evaluated"
    assert (lead["Outcome"].value, lead["Outcome"].notes[0]) == ("diverged", "step 20 of 40 (50%)")
    lead = made(tmp_path / "killed", [train_line(10)])
    assert (lead["Outcome"].value, lead["Outcome"].notes[0]) == (
        "no end recorded",
        "step 10 of 40 (25%)",
    )
    lines = [
        train_line(10),
        fault_line(10, attempt=2, steps_lost=5, recover_s=2.0),
        train_line(20, attempt=2),
    ]
    lines.append(summary_line(20, 10, attempt=2, goodput=0.9, skipped_steps=1, rollbacks=0))
    card = made(tmp_path / "faults", lines)["Goodput"]
    assert (card.value, card.notes[0]) == (
        "90.0%",
        "1 fault survived: 5 steps lost, 2.0 s to recover",
    )
    assert card.notes[2:] == ["2 attempts", "1 step skipped"]


@pytest.mark.parametrize(
    ("outcome", "value", "note", "tone"),
    [
        (("done", "done", "done", 40), "done", "step 40 of 40", "good"),
        (("done", "early_stop", "early_stop", 40), "done", "stopped early", "good"),
        (("stopped", "SIGTERM", "SIGTERM, at rank 0", 40), "stopped", "SIGTERM, at rank 0", ""),
        (
            ("failed", "stuck", "failed: stuck\x1b[31m", None),
            "failed",
            "failed: stuck\ufffd[31m",
            "bad",
        ),
        (("refused", "refused", "x" * 5000, None), "refused", "x" * 300, "bad"),
    ],
)
def test_the_outcome_says_why(tmp_path, outcome, value, note, tone):
    run = write_run(tmp_path / "run", whole_run())
    write_outcome(LocalFolder(run), Outcome(*outcome, checkpoint=None, goes_on=False))
    card = cards_of(run)["Outcome"]
    assert (card.value, card.tone) == (value, tone)
    assert any(line.startswith(note) for line in card.notes) and max(map(len, card.notes)) < 400


def test_an_outcome_of_another_program_is_none(tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    (run / "outcome.json").write_text('{"result": 1}')
    assert read_run(run).outcome == {}


# ---- several runs --------------------------------------------------------------------------------------------------


def any_best(cells: list[cards.Cell]) -> bool:
    return any(cell.is_best for cell in cells)


def test_the_best_of_several_runs_is_marked_and_a_failure_named(tmp_path):
    first = write_run(tmp_path / "a", whole_run(cost_usd=2.0))
    slow = [*whole_run()[:-1], summary_line(40, 80, cost_usd=1.0)]
    slow[-3] = eval_line(40, loss=4.0)
    second = write_run(tmp_path / "b", slow)
    rows = beside(first, second)
    assert [cell.ratio for cell in rows["Cost"]] == ["", "0.50 times"]
    assert [cell.ratio for cell in rows["Final quality"]] == ["", ""]
    best = {
        name: [cell.is_best for cell in cells].index(True)
        for name, cells in rows.items()
        if any_best(cells)
    }
    assert best == {"Final quality": 1, "Training time": 0, "Cost": 1}  # training losses are equal
    write_outcome(
        LocalFolder(second), Outcome("failed", "stuck", "rank 3 hangs", None, 20, goes_on=True)
    )
    words = shown(page.render([read_run(first), read_run(second)], tmp_path / "out").read_text())
    assert (
        words.index("rank 3 hangs")
        < words.index("Curves")
        < words.index("Configuration differences")
    )
    assert words.index("Configuration differences") < words.index("Tokens/s over the whole run")


def test_runs_that_did_other_work_are_not_ranked_by_it(tmp_path):
    whole = write_run(tmp_path / "a", whole_run())
    short = write_run(tmp_path / "b", [train_line(10), eval_line(10), summary_line(10, 10)])
    on_data = [
        write_run(
            tmp_path / name,
            [train_line(10), eval_line(10, loss=loss)],
            environment={"identity": {"data": name}},
        )
        for name, loss in (("x", 2.0), ("y", 4.0))
    ]
    classifier = finished_run.write(tmp_path / "c")
    kinds = ((whole, short), ["Training time"]), (on_data, ["Final quality"])
    rated = write_run(
        tmp_path / "d", whole_run(cost_usd=1.0), config={"optim": {"name": "adamw", "lr": 0.1}}
    )
    other_lr = (
        write_run(tmp_path / "e", [*whole_run()[:-1], summary_line(40, 30, cost_usd=2.0)]),
        rated,
    )
    kinds = *kinds, (other_lr, ["Final quality", "Tokens per second", "Training time", "Cost"])
    for runs, names in (*kinds, ((whole, classifier), ["Final quality", "Training loss"])):
        rows = beside(*runs)
        assert not [name for name in names if any_best(rows[name])]
    assert [cell.card is None for cell in rows["Cost"]] == [True, False]


# ---- the page ------------------------------------------------------------------------------------------------------


def test_a_report_leads_with_what_people_look_for(tmp_path):
    run = finished_run.write(tmp_path / "run", weights=30)
    (run / "samples.json").write_text(json.dumps({"step": 30, "samples": [SAMPLE]}))
    quality = cards_of(run)["Final quality"]
    assert (quality.title, quality.value) == ("Validation f1 macro", "0.700")
    assert quality.notes[:2] == ["best 0.750 at step 20, exported at step 30", "accuracy 0.760"]
    assert quality.notes[2].endswith("accuracy of guessing the most frequent label: 0.500")
    html = page.render([read_run(run)], tmp_path / "out").read_text()
    wanted = [
        "Outcome",
        "Model",
        "Validation f1 macro",
        "Training loss",
        "Tokens per second",
        "Training time",
        "Cost",
    ]
    wanted += [
        "Goodput",
        "Curves",
        "Sample predictions",
        "Data",
        "Evaluation at step 20",
        "Details",
    ]
    assert re.findall(r"<h2>(.*?)</h2>", html) == wanted
    # the long table is folded
    assert html.index("<details") < html.index("Tokens/s over the whole run")
    pictures = re.findall(r'<img alt="(.*?)"', html)
    assert pictures[:4] == [
        "Training and validation loss",
        "Throughput",
        "Validation accuracy",
        "Validation f1 macro",
    ]
    assert "a [1] text \u2717 [1] good bad · 75.0%" in shown(html)


def test_figures_have_the_same_names_in_every_report(tmp_path):
    few = read_run(write_run(tmp_path / "few", [train_line(10), eval_line(10)]))
    odd = ["aaa", "x/../y", "z" * 300]  # names of further splits
    lines = [train_line(10), eval_line(10, **{f"{split}_loss": 1.0 for split in odd})]
    data = {"data": {"more_validation": dict.fromkeys(odd, "file")}}
    many = read_run(write_run(tmp_path / "many", lines, config=data))
    names = [[panel.name for panel in panels([run])] for run in (few, many)]
    assert set(names[0]) < set(names[1]) and names[0][2:4] == [
        "validation_perplexity",
        "validation_masked_accuracy",
    ]
    assert all(re.fullmatch(r"[a-z0-9_]{1,100}", name) for name in names[1])


# ---- samples -------------------------------------------------------------------------------------------------------


def samples_with(answer: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "samples": [{**SAMPLE, "answers": [{**ANSWER, **(answer or {})}], **changes}],
    }


HOSTILE: list[tuple[Any, str]] = [
    ([1], "not a JSON object"),
    (samples_with(answers=[]), "a sample has no answer"),
    (samples_with({"guesses": []}), "an answer has no guess"),
    (samples_with({"score": "good"}), "is 'good', not a number"),
    ({**samples_with(), "more": "x" * 2**20}, "bytes, more than 1,048,576"),
]


@pytest.mark.parametrize(("content", "why"), HOSTILE, ids=[why for _, why in HOSTILE])
def test_damaged_samples_are_rejected_by_name(tmp_path, content, why):
    run = write_run(tmp_path / "run", whole_run())
    (run / "samples.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"samples\.json is damaged: .*{why}"):
        page.render([read_run(run)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
