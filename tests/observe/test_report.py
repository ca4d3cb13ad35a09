"""The report: what it says of a run folder, what it rejects, and that it stays one harmless file."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import finished_run
import pytest
from rejections import rejects
from reported_runs import (
    BATCH,
    STEP_S,
    TOKENS_PER_STEP,
    eval_line,
    fault_line,
    save_line,
    shown,
    summary_line,
    train_line,
    whole_run,
    write_run,
)
from running import ROOT

from train.config import InputError
from train.observe.report import comparison, page
from train.observe.report import figures as report_figures
from train.observe.report import run as report_run
from train.run_folder.outcome import Outcome, write_outcome
from train.storage.folders import LocalFolder
from train.tools import report as report_command

pytest.importorskip("matplotlib")


def read(folder: Path, lines: list[dict[str, Any]], **more: Any) -> report_run.Run:
    return report_run.read_run(write_run(folder, lines, **more))


def facts(run: report_run.Run) -> dict[str, str]:
    return page.facts(run, run)


def rejected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line that the command line says as it rejects them."""
    assert report_command.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


def html_of(run: Path) -> str:
    """Return the page that the command line writes."""
    assert report_command.main([str(run)]) == 0
    return (run / "report" / "report.html").read_text()


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Return of a run without labelled data, MFU or price: its folder, its report, and what was printed."""
    run = write_run(tmp_path_factory.mktemp("reported") / "run", whole_run())
    with redirect_stdout(io.StringIO()) as printed:
        html = html_of(run)
    return run, html, printed.getvalue()


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_report_is_one_file_that_loads_nothing_and_says_why_figures_are_unknown(reported):
    run, html, printed = reported
    assert [path.name for path in (run / "report").iterdir()] == ["report.html"]
    sources = re.findall(r"""(?:src|href|srcset|data|action)\s*=\s*["']?([^"'\s>]+)""", html)
    assert len(sources) == 7  # curves
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<script|<link|<iframe|@import|url\(", html)
    assert "https://example.com/prices" in html  # a setting is shown, not loaded
    assert str(run / "report" / "report.html") in printed
    assert not re.search(" (Data|Evaluation|Labels|Bad rows) ", shown(html))  # no labelled data
    for name, key in (("MFU", "device_tflops_bf16"), ("Cost", "usd_per_hour")):
        assert re.search(rf"{name}</th>\s*<td class=\"unknown\">unknown</td>", html)
        assert f"instance.{key}" in html


def test_several_runs_are_compared_beside_the_first(tmp_path):
    first = write_run(tmp_path / "a-rather-long-name", whole_run())
    other = {"optim": {"name": "lamb", "lr": 0.001}, "run_dir": "runs/b", "extra": 1}
    second = write_run(tmp_path / "b", whole_run(), config=other)
    write_outcome(
        LocalFolder(second), Outcome("failed", "stuck", "rank 3 hangs", None, 20, goes_on=True)
    )
    assert report_command.main([str(first), str(second)]) == 0
    words = shown((tmp_path / "report" / "report.html").read_text())
    assert words.count("extra - 1 optim.name adamw lamb") == 1
    assert "Further settings that differ" not in words
    assert words.index("rank 3 hangs") < words.index("Tokens/s over") < words.index("Curves")
    runs = [report_run.read_run(first), report_run.read_run(second)]
    assert report_figures.x_axis(runs) == "step"
    runs.append(
        read(tmp_path / "c" / "b", whole_run(), environment={"plan": {"global_batch_size": 64}})
    )
    assert report_figures.x_axis(runs) == "examples"  # equal steps are unequal work
    report_run.tell_apart(runs[1:])
    assert [run.label for run in runs[1:]] == [f"{tmp_path.name}/b", "c/b"]


def test_a_task_that_is_not_known_names_the_flag_for_its_scores(tmp_path, capsys):
    run = write_run(tmp_path / "a", whole_run(), config={"task": {"kind": "focal"}})
    assert report_command.main([str(run)]) == 0
    says = "a: task.kind=focal is not known; --import its file to see all scores"
    assert says in capsys.readouterr().out
    assert says in shown((run / "report" / "report.html").read_text())


def test_settings_that_do_not_fit_at_the_top_stand_further_down_once(tmp_path):
    names = [f"key{number}" for number in range(10)]
    runs = [
        write_run(tmp_path / name, whole_run(), config=dict.fromkeys(names, name)) for name in "ab"
    ]
    assert report_command.main([str(run) for run in runs]) == 0
    words = shown((tmp_path / "report" / "report.html").read_text())
    top, further = words.split("Further settings that differ")
    for number, name in enumerate(names):
        is_further = number >= page.MOST_SETTINGS
        assert (f"{name} a b" in top, f"{name} a b" in further) == (not is_further, is_further)


def test_hostile_names_and_values_are_escaped(tmp_path):
    evil = "<img src=x onerror=alert(1)>\"'&$^{$\u202e"
    config = {"optim": {"name": f"</details><script>{evil}"}, "task": {"kind": evil}}
    config["best"] = {"metric": f"{evil}accuracy"}
    lines = [eval_line(1, **{f"{evil}accuracy": 0.5}), fault_line(1, evil), *whole_run()]
    runs = [write_run(tmp_path / name, lines, config=config) for name in (evil, f"_{evil}")]
    environment = {"host": f"{evil}\x1b[31m\ud800", evil: evil}
    (runs[0] / "environment.json").write_text(json.dumps(environment))
    guess = {"text": evil, "probability": 1}
    answer = {"truth": evil, "score": 0.5, "guesses": [guess] * 3}
    sample = {"text": evil, "context": evil, "answers": [answer] * 8}
    (runs[0] / "samples.json").write_text(json.dumps({"step": 1, "samples": [sample] * 32}))
    output = tmp_path / "out"
    for chosen, least in ((runs[:1], 32 * (2 + 8 * 4)), (runs, 1)):
        words = [str(run) for run in chosen]
        assert report_command.main([*words, "--output", str(output)]) == 0
        html = (output / "report.html").read_text()
        assert not re.search("<script|<img src=x|\x1b|\u202e", html)
        assert html.count("&lt;img src=x onerror=alert(1)&gt;") > least


def test_a_card_and_a_report_need_no_torch_and_a_card_no_matplotlib(tmp_path):
    code = "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; from pathlib import Path; "
    code += "from train.observe.card import card; from train.tools.report import main; run = sys.argv[1]; "
    code += "print(card(Path(run), 'x')); del sys.modules['matplotlib']; sys.exit(main([run]))"
    words = [sys.executable, "-c", code, str(write_run(tmp_path / "run", whole_run()))]
    backend = "module://matplotlib_inline.backend_inline"  # as a notebook hands it on
    env = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run(words, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    assert "## Results" in done.stdout


# ---- figures -------------------------------------------------------------------------------------------------------


def drawn(*runs: report_run.Run) -> dict[str, Any]:
    """Return the figures of the runs' curves by title."""
    every = list(runs)
    with report_figures.style():
        figures = {
            panel.title: report_figures.draw(panel, every, report_figures.x_axis(every))
            for panel in report_figures.panels(every)
        }
    return {title: figure for title, figure in figures.items() if figure is not None}


def legend(figure: Any) -> list[str]:
    return [name.strip() for name in figure.axes[0].get_legend_handles_labels()[1]]


def test_all_curves_begin_at_0_and_end_together(tmp_path):
    lines = [train_line(20, mfu=0.9), train_line(40, mfu=0.9), eval_line(30)]
    figures = drawn(read(tmp_path / "run", lines))
    assert len(figures) >= 7
    assert {figure.axes[0].get_xlim() for figure in figures.values()} == {(0.0, 40.0)}


def test_legends_name_runs_and_marks(tmp_path):
    counted = {"neighbour_accuracy": 0.26}
    runs = [read(tmp_path / name, whole_run(), environment=counted) for name in ("_a", "b")]
    # one that begins with an underscore too
    assert legend(drawn(*runs)["Throughput"]) == ["_a", "b"]
    figures = drawn(runs[0])
    loss = figures["Training and validation loss"]
    assert legend(loss) == ["training", "validation", "unigram entropy"]
    assert "table of neighbouring tokens" in legend(figures["Validation masked accuracy"])


@pytest.mark.parametrize("losses", [[2.0, 1.5, None, None], [None] * 4])
def test_a_run_that_diverged_says_so(tmp_path, losses):
    lines = [train_line(10 * number, loss=loss) for number, loss in enumerate(losses, start=1)]
    run = read(tmp_path / "run", [*lines, summary_line(40, 40)])
    outcome = page.cards(run)[0]
    assert (outcome.value, outcome.tone) == ("diverged", "bad")
    assert outcome.notes[1].startswith("the loss is not finite: try a lower optim.lr")
    assert ["Final training loss", "unknown"] in page.table([run])
    assert drawn(run)
    good = read(tmp_path / "good", whole_run())
    assert "run: diverged: the loss is not finite" in "\n".join(comparison.warnings([good, run]))


# ---- the lines of a run --------------------------------------------------------------------------------------------


HALF = '{"kind": "tr'


def test_lines_that_a_resume_redid_are_dropped(tmp_path):
    lines = [train_line(10), train_line(20, loss=99.0), eval_line(20, loss=99.0)]
    lines += [train_line(30, loss=99.0), train_line(20, attempt=2), eval_line(20, attempt=2)]
    lines.append(train_line(40, attempt=2, steps=20))
    run = read(tmp_path / "run", lines)
    assert list(zip(run.train.step, run.train.loss, strict=True)) == [(10, 8), (20, 7), (40, 5)]
    assert list(run.evaluations.loss) == [7.0]
    shares = [0.5 / (10 * STEP_S), 0.5 / (10 * STEP_S), 0.5 / (20 * STEP_S)]
    assert list(run.train.data_wait_share) == shares  # of all steps that a line speaks for
    run = read(tmp_path / "rolled back", [*UNDONE, *REDONE])
    assert list(run.train.step) == [10, 20, 30, 40]


def test_a_damaged_line_is_left_out_and_named(tmp_path, log):
    tail = f"{HALF}\n{json.dumps({**train_line(20), 'time_unix_s': 1.8e9})}\n{HALF}"
    run = report_run.read_run(write_run(tmp_path / "run", [train_line(10)], tail=tail))
    assert list(run.train.step) == [10, 20]
    (message,) = log.messages
    assert "metrics.jsonl: a line is not JSON" in message
    assert message.endswith("; such lines are left out")


KILLED = [train_line(10, mfu=0.2), train_line(20, mfu=0.4), save_line(20)]
KILLED.append(train_line(30, mfu=0.6, cost_usd=1.5))
NO_STEP = fault_line(20, "a checkpoint is damaged", attempt=3)  # it came to no step
UNDONE = [train_line(10), save_line(15), train_line(20), train_line(30)]
UNDONE += [fault_line(30), fault_line(15)]
REDONE = [train_line(step, since=-15, examples=(step + 15) * BATCH) for step in (20, 30, 40)]


def second(step: int, since: int, **end: Any) -> list[dict[str, Any]]:
    line = train_line(step, attempt=2, since=since)
    return [line, summary_line(step, step - since, attempt=2, **end)]


RESUMED = [train_line(20), summary_line(20, 20, cost_usd=1.0)]
ATTEMPTS: dict[str, tuple[list[dict[str, Any]], int, int, dict[str, Any]]] = {
    # name: lines, steps, steps that were trained, further values
    "resumed": (
        [*RESUMED, *second(15, 10, mfu=0.5, cost_usd=3.0)],
        15,
        25,
        {"attempts": 2, "attempts_without_summary": 0, "cost_usd": 3.0, "mfu": 0.5},
    ),
    "killed": (
        [*KILLED, *second(40, 20, cost_usd=2.0), NO_STEP],
        40,
        50,
        {"attempts": 2, "mfu": 0.6, "cost_usd": 2.0},
    ),
    "killed after a save": (
        [*KILLED, *second(40, 30), NO_STEP],
        40,
        40,
        {"attempts_without_summary": 1, "cost_partial": True},
    ),
    "rolled back": (
        [*UNDONE, *REDONE, summary_line(40, 55)],
        40,
        55,
        {"examples": 55 * BATCH, "reason": "done"},
    ),
    "rolled back, killed": ([*UNDONE, REDONE[0], save_line(15)], 20, 35, {"attempts": 1}),
    "no end yet": (
        [train_line(10), summary_line(10, 10, wall_s=6.0), second(20, 10)[0]],
        20,
        20,
        {"wall_s": None, "reason": None},
    ),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_steps_time_and_money_are_counted_over_all_attempts(tmp_path, name):
    lines, steps, trained, more = ATTEMPTS[name]
    summary = read(tmp_path / "run", lines).summary
    expected = {"steps": steps, "train_s": trained * STEP_S, "tokens": trained * TOKENS_PER_STEP}
    expected |= {"tokens_per_s": TOKENS_PER_STEP / STEP_S, **more}
    assert {key: summary[key] for key in expected} == pytest.approx(expected)


def test_best_and_last_scores_are_of_all_metrics_and_of_nothing_else(tmp_path):
    lines = [
        eval_line(10, sop_accuracy=0.9, odd=3),
        eval_line(20, sop_accuracy=0.4, odd=1, cost_usd=2.0),
        eval_line(30, sop_accuracy=0.5, loss=8.5, perplexity=None, cost_usd=3.0),
    ]
    run = read(tmp_path / "run", [train_line(10), *lines])
    scores = run.summary["scores"]
    assert scores["loss"] == {"best": (7.0, 20), "last": (8.5, 30)}
    # What it became, not an earlier number.
    assert scores["perplexity"] == {"best": (2**7.0, 20), "last": (None, 30)}
    assert scores["sop_accuracy"] == {"best": (0.9, 10), "last": (0.5, 30)}
    assert set(scores) == {"loss", "perplexity", "masked_accuracy", "sop_accuracy"}
    assert facts(run)["Validation perplexity, last"] == "no number at step 30"


# ---- cards ---------------------------------------------------------------------------------------------------------


def test_the_cards_say_how_it_ended_how_good_and_how_fast(tmp_path):
    run = read(tmp_path / "run", whole_run(mfu=0.4321, cost_usd=1.5))
    assert {card.title: card.value for card in page.cards(run)} == {
        "Validation loss": "5.000",
        "Outcome": "no end recorded",
        "Model": "albert",
        "Parameters": "123,456",
        "Tokens/s over the whole run": "4,096",
        "MFU": "43.2%",
        "Training time (h:mm:ss)": "0:00:20",
        "Cost": "$1.50",
    }
    assert page.cards(run)[0].title == "Validation loss"
    # The loss of the tokens, without that of their order.
    ordered = [train_line(10), eval_line(10, mlm_loss=8.5), summary_line(10, 10)]
    card = page.cards(read(tmp_path / "sop", ordered))[0]
    assert (card.title, card.value) == ("Validation mlm loss", "8.500")


@pytest.mark.parametrize(
    ("pretrained", "name"),
    [
        ("runs/demo", "runs/demo"),
        ("org/model", "org/model"),
        ("/home/jane/models/minilm/", "models/minilm"),
        ("s3://bucket/runs/demo/export", "runs/demo"),
    ],
)
def test_a_model_has_its_name_and_not_the_path_to_it(tmp_path, pretrained, name):
    tuned = {"model": {"architecture": "albert", "pretrained": pretrained}}
    assert facts(read(tmp_path / "tuned", whole_run(), config=tuned))["Model"] == name


def test_the_best_run_comes_first_with_the_settings_that_differ(tmp_path):
    def learnt(name: str, *losses: float | None, **config: Any) -> report_run.Run:
        lines = [eval_line(20 * number, loss=loss) for number, loss in enumerate(losses, 1)]
        return read(tmp_path / name, [train_line(40), *lines, summary_line(40, 40)], config=config)

    slow = learnt("slow", 5.0, 5.5)
    fast = learnt("fast", 4.0, 4.5, optim={"name": "adamw", "lr": 0.01})
    lost = learnt("lost", 3.0, None, optim={"name": "adamw", "lr": 0.1})
    runs = [slow, fast, lost]
    html = page.render(runs, tmp_path / "out").read_text()
    words = shown(html)
    assert "Best validation loss 4.500 · fast at step 40 optim.lr=0.01" in words
    rates, last, best, outcome = page.top_rows(runs)[:4]
    assert last[1:] == ["5.5000 at step 40", "4.5000 at step 40", "no number at step 40"]
    assert best[3] == "3.0000 at step 20" and outcome[0] == "Outcome"
    assert rates == ["optim.lr", "0.001", "0.01", "0.1"]
    # Not of scores that cannot be compared, nor of a lucky seed.
    assert page.best_of([slow, learnt("other", 1.0, task={"kind": "classify"})]) is None
    assert page.best_of([slow, learnt("seed", 1.0, seed=1)]) is None
    assert page.best_of([lost]) is None


def test_the_page_shows_what_is_worth_most_and_folds_the_rest(tmp_path):
    html = html_of(finished_run.write(tmp_path / "run", weights=30))
    shown_at_once = re.sub(r"<details.*?</details>", "", html, flags=re.S)
    large = re.findall(r'<img alt="([^"]+)"', shown_at_once)
    assert large == ["Training and validation loss", "Validation f1 macro"]
    assert {"Throughput", "Learning rate"} <= {*re.findall(r'<img alt="([^"]+)"', html)}
    words = shown(html)
    assert words.index("Validation f1 macro 0.700") < words.index("Outcome")
    assert words.count("Validation f1 macro 0.700") == 1
    assert "Goodput" not in shown(shown_at_once).split("Details")[0]
    assert "Padding" not in shown(shown_at_once)


def test_a_class_that_is_never_found_has_a_remark(tmp_path):
    run = finished_run.write(tmp_path / "run", weights=30)
    assert "recall 0" not in shown(html_of(run))
    file = run / "evaluation.json"
    file.write_text(file.read_text().replace('"recall": 0.8,', '"recall": 0.0,'))
    assert "validation: the model never finds neutral (0 of 30): recall 0" in shown(html_of(run))


@pytest.mark.parametrize(
    ("outcome", "value", "note", "tone"),
    [
        (("done", "done", "done", 40), "done", "step 40 of 40", "good"),
        (("done", "early_stop", "early_stop", 40), "done", "stopped early", "good"),
        (("failed", "stuck", "stuck\x1b[31m", None), "failed", "stuck\ufffd[31m", "bad"),
        (("refused", "refused", "x" * 5000, None), "refused", "x" * 140, "bad"),
    ],
)
def test_the_outcome_says_why(tmp_path, outcome, value, note, tone):
    run = write_run(tmp_path / "run", whole_run())
    write_outcome(LocalFolder(run), Outcome(*outcome, checkpoint=None, goes_on=False))
    card = page.cards(report_run.read_run(run))[1]
    assert (card.value, card.tone) == (value, tone)
    assert any(line.startswith(note) for line in card.notes) and max(map(len, card.notes)) < 400


# ---- labelled data, its evaluation, and samples --------------------------------------------------------------------


ANSWER = {"truth": "good", "score": 0.0, "guesses": [{"text": "bad", "probability": 0.75}]}
SAMPLE: dict[str, Any] = {"text": "a [1] text", "context": "", "answers": [ANSWER]}


def test_data_evaluation_and_samples_of_a_run_are_shown(tmp_path):
    run = finished_run.write(tmp_path / "run", weights=30)
    (run / "samples.json").write_text(json.dumps({"step": 30, "samples": [SAMPLE]}))
    card = page.cards(report_run.read_run(run))[0]
    assert (card.title, card.value) == ("Validation f1 macro", "0.700")
    html = html_of(run)
    words = shown(html)
    for text in (
        "Rows of the files 1,009 100",  # with those that are left out
        "Bad rows, left out 2 0",
        "Left out by data.label_map 7",
        "positive 100 (10.0%) 20 (20.0%)",  # training first, whatever the file's order
        "Evaluation at step 20",
        "neutral 0.7000 0.8000 0.7467 30",
        "true, by predicted negative neutral positive negative 44 4 2 neutral 3 24 3",
        "accuracy 0.8100 0.6600",
        "tweets.csv:99: &lt;b&gt;?&lt;/b&gt;",
        "a [1] text \u2717 [1] true: good model: bad · 75.0%",
    ):
        assert text in words
    assert html.index("Curves") < html.index("Sample predictions") < html.index("Details")


# ---- what it rejects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "tail", "damage", "said"),
    [
        ([], "", {}, "no lines yet"),
        ([], HALF, {}, "no lines yet"),
        ([], '{"kind": "train", "step": 1, "time_unix_s": 1}\n', {}, "an earlier version wrote"),
        (whole_run(), "", {"config.yaml": "a: [1"}, "config.yaml is damaged"),
        (whole_run(), "", {"environment.json": None}, "it is a folder, not a regular file"),
        (whole_run(), "", {"data.json": "[1]"}, "data.json is damaged: expected a mapping"),
        (whole_run(), "", {"samples.json": "[1]"}, "samples.json is damaged: it is not a JSON"),
    ],
)
def test_what_is_no_run_is_rejected_and_nothing_written(
    tmp_path, capsys, lines, tail, damage, said
):
    run = write_run(tmp_path / "run", lines, tail=tail)
    for name, content in damage.items():
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir() if content is None else (run / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    error = rejected(capsys, run)
    assert str(run) in error and said in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_of_more_than_a_gigabyte_is_rejected_unread(tmp_path, capsys):
    run = write_run(tmp_path / "run", whole_run())
    os.truncate(run / "metrics.jsonl", report_run.MOST_BYTES + 1)
    assert "metrics.jsonl has more than 1 GB" in rejected(capsys, run)


def test_a_missing_package_is_named_with_its_cure(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = rejected(capsys, write_run(tmp_path / "run", whole_run()))
    assert "matplotlib" in said and "pip install 'baretrain[report]'" in said


def test_a_run_in_s3_is_reported_here(bucket, tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    local = write_run(tmp_path / "albert", whole_run())
    for path in local.iterdir():
        bucket.put(f"runs/albert/{path.name}", path.read_bytes())
    folder = bucket.location("runs/albert")
    flags = bucket.config().flags()
    before = bucket.keys()
    assert report_command.main([f"{folder}/", *flags]) == 0
    html = tmp_path / "here/albert-report/report.html"
    assert f"report: {html}" in capsys.readouterr().out
    assert f"from {folder}" in shown(html.read_text())
    assert bucket.keys() == before
    assert report_command.main([folder, str(local), *flags]) == 0
    assert "Comparison of 2 runs" in (tmp_path / "here/report/report.html").read_text()


LONG = "9" * 400
DEEP = "[" * 140 + "]" * 140
FORGED = [  # a file, what is replaced in it, by what
    ("metrics.jsonl", '"train_s": 7200.0', f'"train_s": {LONG}'),
    ("metrics.jsonl", '"train_s": 7200.0', '"train_s": ["a", 1]'),
    ("metrics.jsonl", '"train_s": 7200.0', '"train_s": 1e300'),
    ("metrics.jsonl", '"time_unix_s": 1800000006.0', f'"time_unix_s": {LONG}'),
    ("metrics.jsonl", '"time_unix_s": 1800000007.0', '"time_unix_s": 1e300'),
    ("data.json", '"rows": 100,', '"rows": 100, "rows": 99,'),
    ("evaluation.json", '"precision": 0.9', '"precision": true'),
    ("evaluation.json", '"precision": 0.9', f'"precision": {LONG}'),
    ("environment.json", '"parameters": 1234567', f'"parameters": {DEEP}'),
    ("config.yaml", '"weight_decay": 0.01', f'"weight_decay": {DEEP}'),
]


@pytest.mark.parametrize(("name", "before", "after"), FORGED)
def test_a_forged_value_is_rejected_by_file_or_left_out(tmp_path, name, before, after):
    file = finished_run.write(tmp_path / "run") / name
    assert file.read_text().count(before) >= 1
    file.write_text(file.read_text().replace(before, after, 1))
    is_left_out = name == "metrics.jsonl" or "true" in after
    if not is_left_out:
        rejects(rf"{name} is damaged", report_run.read_run, tmp_path / "run")
        return
    run = report_run.read_run(tmp_path / "run")
    assert run.summary["train_s"] in (None, 7200.0) and page.table([run])
    assert page.render([run], tmp_path / "out").exists()


def samples_with(answer: Any = None, **changes: Any) -> dict[str, Any]:
    sample = {**SAMPLE, "answers": [{**ANSWER, **(answer or {})}], **changes}
    return {"step": 1, "samples": [sample]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (samples_with(answers=[]), "a sample has no answer"),
        (samples_with({"guesses": []}), "an answer has no guess"),
        ({**samples_with(), "more": "x" * 2**20}, "bytes, more than 1,048,576"),
    ],
)
def test_damaged_samples_are_rejected_by_name(tmp_path, content, why):
    run = write_run(tmp_path / "run", whole_run())
    (run / "samples.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"samples\.json is damaged: .*{why}"):
        page.render([report_run.read_run(run)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
