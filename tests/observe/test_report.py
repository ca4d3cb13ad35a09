"""The report: what it says of a run folder, what it rejects, and that it stays one harmless file."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import finished_run
import pytest
from rejections import rejects
from reported_runs import (
    BATCH,
    SEQ_LEN,
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
from services.fault_proxy import Fault

from train.observe.report import cards, comparison, data_figures
from train.observe.report import data as report_data
from train.observe.report import figures as report_figures
from train.observe.report import lines as report_lines
from train.observe.report import page as report
from train.observe.report import run as report_run
from train.tools import report as report_command

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


def summarise(folder: Path, lines: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return report_run.summarise(report_run.read_run(write_run(folder, lines, **more)))


def facts(folder: Path) -> dict[str, str]:
    run = report_run.read_run(folder)
    return report.facts(run, run)


def rejected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command line says as it rejects them."""
    assert report_command.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A run without labelled data, MFU or price: its folder, its report, and what was printed."""
    run = write_run(tmp_path_factory.mktemp("reported") / "run", whole_run())
    with redirect_stdout(io.StringIO()) as printed:
        assert report_command.main([str(run)]) == 0
    return run, (run / "report" / "report.html").read_text(), printed.getvalue()


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_report_is_one_file_that_loads_nothing(reported):
    run, html, printed = reported
    names = {
        "training_loss",
        "tokens_per_second",
        "validation_perplexity",
        "validation_masked_accuracy",
    }
    names |= {"learning_rate", "data_wait_share", "goodput", "gradient_norm"}
    assert {path.name for path in (run / "report").iterdir()} == {
        "report.html",
        *(f"{name}.png" for name in names),
    }
    sources = re.findall(r"""(?:src|href|srcset|data|action)\s*=\s*["']?([^"'\s>]+)""", html)
    assert len(sources) == len(names)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<script|<link|<iframe|@import|url\(", html)
    # a value of the configuration is shown, not loaded
    assert "https://example.com/prices" in html
    assert str(run / "report" / "report.html") in printed
    # it has no labelled data
    assert not re.search(" (Data|Evaluation|Labels|Bad rows) ", shown(html))


def test_several_runs_are_compared_beside_the_first(tmp_path, capsys):
    first = write_run(tmp_path / "a-rather-long-name", whole_run())
    other = {"optim": {"name": "lamb", "lr": 0.001}, "run_dir": "runs/b", "extra": 1}
    second = write_run(tmp_path / "b", whole_run(), config=other)
    assert report_command.main([str(first), str(second)]) == 0
    html = (tmp_path / "report" / "report.html").read_text()
    differences = shown(html).split("Configuration differences")[1].split("Tokens/s")[0]
    assert "extra - 1 optim.name adamw lamb" in differences and "optim.lr" not in differences
    assert not (first / "report").exists()
    lines = capsys.readouterr().out.splitlines()
    table = lines[: lines.index("")]
    column = table[0].index("a-rather-long-name")
    assert all(line[column - 1] == " " and line[column] != " " for line in table)
    runs = [report_run.read_run(first), report_run.read_run(second)]
    assert report_figures.x_axis(runs) == "step"
    plan = {"plan": {"global_batch_size": 64}}
    runs.append(
        report_run.read_run(write_run(tmp_path / "c" / "b", whole_run(), environment=plan))
    )
    assert report_figures.x_axis(runs) == "examples"  # equal steps are unequal work
    report_run.tell_apart(runs[1:])
    assert [run.label for run in runs[1:]] == [f"{tmp_path.name}/b", "c/b"]


def test_hostile_names_and_values_are_escaped(tmp_path):
    evil = "<img src=x onerror=alert(1)>\"'&$^{$\u202e"
    config = {"optim": {"name": f"</details><script>{evil}"}, "task": {"kind": evil}}
    lines = [eval_line(1, **{f"{evil}accuracy": 0.5}), fault_line(1, evil), *whole_run()]
    runs = [write_run(tmp_path / name, lines, config=config) for name in (evil, f"_{evil}")]
    (runs[0] / "environment.json").write_text(
        json.dumps({"host": f"{evil}\x1b[31m\ud800", evil: evil})
    )
    guess = {"text": evil, "probability": 1}
    sample = {
        "text": evil,
        "context": evil,
        "answers": [{"truth": evil, "score": 0.5, "guesses": [guess] * 3}] * 8,
    }
    (runs[0] / "samples.json").write_text(json.dumps({"step": 1, "samples": [sample] * 32}))
    for chosen in (runs[:1], runs):
        assert (
            report_command.main([str(run) for run in chosen] + ["--output", str(tmp_path / "out")])
            == 0
        )
        html = (tmp_path / "out" / "report.html").read_text()
        assert not re.search("<script|<img src=x|\x1b|\u202e", html)
        assert html.count("&lt;img src=x onerror=alert(1)&gt;") > (
            32 * (2 + 8 * 4) if len(chosen) == 1 else 1
        )
        assert all(
            re.fullmatch(r"[A-Za-z0-9_]+\.(png|html)", path.name)
            for path in (tmp_path / "out").iterdir()
        )


def test_a_long_curve_is_thinned_without_losing_a_spike_and_every_run_is_in_the_legend(
    tmp_path, monkeypatch
):
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    values = [1.0] * 77_777 + [50.0] + [1.0] * 22_222
    report_figures.curve(
        axes, list(range(100_000)), values, values, values, band=True, color="#000000"
    )
    drawn: Any = axes.lines[0].get_xdata()
    assert 100 <= len(drawn) <= report_figures.MAX_POINTS
    assert axes.dataLim.y1 == 50.0
    named: list[str] = []
    monkeypatch.setattr(
        Figure,
        "legend",
        lambda self, **_: named.extend(self.axes[0].get_legend_handles_labels()[1]),
    )
    runs = [report_run.read_run(write_run(tmp_path / name, whole_run())) for name in ("_a", "b")]
    report_figures.draw(report_figures.THROUGHPUT, runs, "step")
    # one that begins with an underscore too
    assert [name.strip() for name in named] == [
        "_a",
        "b",
    ]
    monkeypatch.setattr(
        report_figures, "finish", lambda axes, *_: named.append(axes.lines[-1].get_label().strip())
    )
    for panel in (
        report_figures.THROUGHPUT,
        next(p for p in report_figures.panels(runs) if p.kind == "eval"),
    ):
        report_figures.draw(panel, runs[:1], "step")
    assert named[2:] == ["training", "validation"]


def test_all_curves_begin_at_0_end_together_and_exceed_no_share(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn: dict[str, Axes] = {}
    monkeypatch.setattr(
        report_figures,
        "png_of",
        lambda figure: drawn.update({figure.axes[0].get_title(): figure.axes[0]}),
    )
    late = eval_line(40, loss=1.0, masked_accuracy=1.0, exact_match=99.5)
    lines = [
        *(train_line(step, goodput=0.99) for step in (20, 40)),
        eval_line(30, masked_accuracy=0.2),
        late,
    ]
    run = report_run.read_run(write_run(tmp_path / "run", lines, config={"task": {"kind": "qa"}}))
    for panel in (
        *report_figures.panels([run]),
        report_figures.Panel("m", "Found", "", "masked_accuracy", kind="eval", at_most=(1.0,)),
    ):
        report_figures.draw(panel, [run], "step")
    assert len(drawn) >= 7 and {axes.get_xlim() for axes in drawn.values()} == {(0.0, 40.0)}
    assert drawn["Goodput"].get_ylim() == (0.0, 1.0)
    assert (
        drawn["Found"].get_ylim()[1] == 1.0
        and drawn["Validation exact match"].get_ylim()[1] == 100.0
    )


@pytest.mark.parametrize(("losses", "begin"), [([2.0, 1.5, None, None], 20), ([None] * 4, 0)])
def test_a_run_that_diverged_says_so_and_since_when(tmp_path, losses, begin, monkeypatch):
    from matplotlib.figure import Figure

    lines = [train_line(10 * number, loss=loss) for number, loss in enumerate(losses, start=1)]
    run = report_run.read_run(write_run(tmp_path / "run", [*lines, summary_line(40, 40)]))
    outcome = cards.cards(run)["Outcome"]
    since = f"after step {begin}" if begin else "at any step"
    assert (outcome.value, outcome.tone) == ("diverged", "bad")
    assert outcome.notes[1].startswith(f"no finite loss {since}: try a lower optim.lr")
    figures: list[Figure] = []
    monkeypatch.setattr(report_figures, "png_of", figures.append)
    report_figures.draw(report_figures.LOSS, [run], "step")
    (axes,) = figures[0].axes
    assert axes.get_legend_handles_labels()[1][-1] == " no finite loss"
    (shade,) = axes.patches
    assert (shade.get_extents().transformed(axes.transData.inverted()).x0) == pytest.approx(
        begin, abs=0.01
    )
    good = report_run.read_run(write_run(tmp_path / "good", whole_run()))
    report_figures.draw(report_figures.LOSS, [good, run], "step")
    assert " run (diverged)" in figures[1].axes[0].get_legend_handles_labels()[1]
    assert f"run diverged: no finite loss {since}" in "\n".join(comparison.warnings([good, run]))
    run.outcome = {"outcome": "failed", "kind": "not_finite", "reason": "x"}
    run.summary["reason"] = None
    assert "run has failed: step 40 of 40" in [*comparison.warnings([run])]


def test_no_text_of_a_figure_is_small(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    sizes: list[float] = []

    def note(figure: Figure) -> bytes:
        sizes.extend(text.get_fontsize() for text in figure.findobj(Text) if text.get_text())  # type: ignore[attr-defined]
        return b""

    for module in (report_figures, data_figures):
        monkeypatch.setattr(module, "png_of", note)
    runs = [report_run.read_run(write_run(tmp_path / name, whole_run())) for name in "ab"]
    tuned = finished_run.write(tmp_path / "tuned")
    names = [str(number) for number in range(data_figures.MAX_NUMBERED + 1)]
    wide = {"labels": names, "confusion": [[1] * len(names)] * len(names)}
    for splits in ({}, {"splits": {"validation": wide}}):
        change(tuned, "evaluation.json", **splits)
        assert list(data_figures.data_figures(records_of(tuned)))
    assert report_figures.curves(runs) and report_figures.curves(runs[:1])
    assert len(sizes) > 100 and min(sizes) == report_figures.SMALL


def test_a_card_and_a_report_need_no_torch_and_a_card_no_matplotlib(tmp_path):
    code = "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; from pathlib import Path; "
    code += "from train.observe.card import card; from train.tools.report import main; run = sys.argv[1]; "
    code += "print(card(Path(run), 'x')); del sys.modules['matplotlib']; sys.exit(main([run]))"
    words = [sys.executable, "-c", code, str(write_run(tmp_path / "run", whole_run()))]
    # as a notebook hands it on
    env = {
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    done = subprocess.run(words, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    assert "## Results" in done.stdout


# ---- what it says --------------------------------------------------------------------------------------------------


HALF = '{"kind": "tr'


def test_lines_that_a_resume_redid_are_dropped(tmp_path):
    lines = [
        train_line(10),
        train_line(20, loss=99.0),
        eval_line(20, loss=99.0),
        train_line(30, loss=99.0),
    ]
    lines += [
        train_line(20, attempt=2),
        eval_line(20, attempt=2),
        train_line(40, attempt=2, steps=20),
    ]
    run = report_run.read_run(write_run(tmp_path / "run", lines))
    assert [(line["step"], line["loss"]) for line in run.train] == [
        (10, 8.0),
        (20, 7.0),
        (40, 5.0),
    ]
    assert [(line["step"], line["loss"]) for line in run.evaluations] == [(20, 7.0)]
    shares = [line["data_wait_share"] for line in run.train]  # of all steps that a line speaks for
    assert shares == [0.5 / (10 * STEP_S), 0.5 / (10 * STEP_S), 0.5 / (20 * STEP_S)]
    run = report_run.read_run(write_run(tmp_path / "rolled back", [*UNDONE, *REDONE]))
    assert [line["step"] for line in run.train] == [10, 20, 30, 40]


def test_a_damaged_line_is_left_out_and_named(tmp_path, log):
    tail = f"{HALF}\n{json.dumps({**train_line(20), 'time_unix_s': 1.8e9})}\n{HALF}"
    run = report_run.read_run(write_run(tmp_path / "run", [train_line(10)], tail=tail))
    assert [line["step"] for line in run.train] == [10, 20]
    (message,) = log.messages
    assert "metrics.jsonl: a line is not JSON" in message and message.endswith(
        "; such lines are left out"
    )


def long_run(number: int) -> Iterator[dict[str, Any]]:
    """A line of a step, an evaluation and a save in turn, with one spike and one best evaluation."""
    for step in range(number):
        yield train_line(step, loss=50.0 if step == number // 3 else 2.0, mfu=0.5)
        yield eval_line(step, loss=0.5 if step == number // 5 else 2.0)
        yield save_line(step)


def test_a_long_run_is_read_in_little_memory_and_keeps_spikes_ends_and_the_best(
    tmp_path, monkeypatch
):
    """The objects of all lines would take 20 MB. Of a run with 80 steps all is kept."""
    monkeypatch.setattr(report_lines, "MAX_LINES", 50)
    run = write_run(tmp_path / "long", [])
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"attempt": 1, "time_unix_s": 1.8e9, **line}) + "\n"
            for line in long_run(5000)
        )
    report_run.read_run(run)  # imports what it needs
    tracemalloc.start()
    read = report_run.read_run(run)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3e6
    assert 50 <= len(read.train) <= 103 and 50 <= len(read.evaluations) <= 101
    assert (read.train[0]["step"], read.train[-1]["step"], read.saves.number) == (0, 4999, 5000)
    steps = [line["step"] for line in read.train]
    assert steps == sorted(set(steps))
    drawn = report_lines.points(read.train, "loss", "step")
    assert max(drawn.ys) < 10 and max(drawn.highs) == 50.0 and min(drawn.lows) == 2.0
    assert read.summary["scores"]["loss"] == {"best": (0.5, 1000), "last": (2.0, 4999)}
    assert (read.summary["tokens"], read.summary["mfu"]) == (
        4999 * TOKENS_PER_STEP,
        pytest.approx(0.5),
    )
    short = report_run.read_run(write_run(tmp_path / "short", list(long_run(80))))
    assert [len(each) for each in (short.train, short.evaluations)] == [80, 80]
    assert report_lines.points(short.train, "loss", "step").lows == [
        line["loss"] for line in short.train
    ]


KILLED = [
    train_line(10, mfu=0.2),
    train_line(20, mfu=0.4),
    save_line(20),
    train_line(30, mfu=0.6, cost_usd=1.5),
]
# an attempt that came to no step is none
NO_STEP = fault_line(20, "a checkpoint is damaged", attempt=3)
UNDONE = [
    train_line(10),
    save_line(15),
    train_line(20),
    train_line(30),
    fault_line(30),
    fault_line(15),
]
REDONE = [train_line(step, since=-15, examples=(step + 15) * BATCH) for step in (20, 30, 40)]


def second(step: int, since: int, **end: Any) -> list[dict[str, Any]]:
    return [
        train_line(step, attempt=2, since=since),
        summary_line(step, step - since, attempt=2, **end),
    ]


@pytest.mark.parametrize(
    ("lines", "steps", "trained", "expected"),
    [
        (
            [
                train_line(20),
                summary_line(20, 20, mfu=0.1, cost_usd=1.0),
                *second(15, 10, mfu=0.5, cost_usd=3.0),
            ],
            15,  # a resume redid five
            25,
            {
                "attempts": 2,
                "attempts_without_summary": 0,
                "cost_usd": 3.0,
                "mfu": (0.1 * 20 + 0.5 * 5) / 25,
            },
        ),
        (
            [*KILLED, *second(40, 20, cost_usd=2.0), NO_STEP],
            40,
            50,
            {"attempts": 2, "mfu": 0.4, "cost_usd": 2.0},
        ),
        (
            [*KILLED, *second(40, 30), NO_STEP],
            40,
            40,
            {"attempts_without_summary": 1, "cost_partial": True},
        ),
        (
            [train_line(20), save_line(25), summary_line(25, 25)],
            25,
            25,
            {"examples": 25 * BATCH},
        ),  # between two lines
        (
            [*UNDONE, *REDONE, summary_line(40, 55, rollbacks=1)],
            40,
            55,
            {"examples": 55 * BATCH, "rollbacks": 1},
        ),
        ([*UNDONE, REDONE[0], save_line(15)], 20, 35, {"attempts": 1}),
        (
            [train_line(10), summary_line(10, 10, wall_s=6.0), second(20, 10)[0]],
            20,
            20,
            {"wall_s": None},
        ),
    ],
    ids=[
        "resumed",
        "killed",
        "killed after a save",
        "stopped",
        "rolled back",
        "rolled back, killed",
        "no end yet",
    ],
)
def test_steps_time_and_money_are_counted_over_all_attempts(
    tmp_path, lines, steps, trained, expected
):
    summary = summarise(tmp_path / "run", lines)
    expected |= {"steps": steps, "train_s": trained * STEP_S, "tokens": trained * TOKENS_PER_STEP}
    expected["tokens_per_s"] = TOKENS_PER_STEP / STEP_S
    assert {key: summary[key] for key in expected} == pytest.approx(expected)


def test_unknown_mfu_and_cost_are_called_unknown_and_say_why(reported, tmp_path):
    run, html, printed = reported
    assert re.search(r"MFU</th>\s*<td class=\"unknown\">unknown</td>", html)
    assert re.search(r"Cost</th>\s*<td class=\"unknown\">unknown</td>", html)
    assert "for the instance local (instance.device_tflops_fp32)" in html
    assert "for the instance local (instance.usd_per_hour)" in html
    assert "$" not in printed and not (run / "report" / "mfu.png").exists()
    texts = facts(write_run(tmp_path / "run", whole_run(mfu=0.4321, cost_usd=1234.5)))
    assert (texts["MFU"], texts["Cost"]) == ("43.2%", "$1,234.50")
    assert (texts["Sequence length (tokens)"], texts["Backend"], texts["Precision"]) == (
        str(SEQ_LEN),
        "ddp",
        "fp32",
    )


def test_best_and_last_scores_are_of_all_metrics_and_of_nothing_else(tmp_path):
    lines = [
        eval_line(10, sop_accuracy=0.9, odd=3),
        eval_line(20, sop_accuracy=0.4, odd=1, cost_usd=2.0),
        eval_line(30, loss=8.5, perplexity=None, cost_usd=3.0),
    ]
    scores = summarise(tmp_path / "run", [train_line(10), *lines])["scores"]
    assert scores["loss"] == {"best": (7.0, 20), "last": (8.5, 30)}
    # what it became, no earlier number
    assert scores["perplexity"] == {
        "best": (2**7.0, 20),
        "last": (None, 30),
    }
    assert scores["sop_accuracy"] == {"best": (0.9, 10), "last": (0.4, 20)}
    # those that the task declares
    assert set(scores) == {
        "loss",
        "perplexity",
        "masked_accuracy",
        "sop_accuracy",
    }
    assert facts(tmp_path / "run")["Validation perplexity, last"] == "no number at step 30"
    diverged = report_run.read_run(
        write_run(tmp_path / "diverged", [train_line(10), train_line(20, loss=None)])
    )
    assert ["Final training loss", "unknown"] in report.table([diverged])


def test_what_a_table_of_neighbours_knows_is_drawn_beside_the_accuracy(tmp_path):
    drawn = []
    for name, counted in (("known", {"neighbour_accuracy": 0.26}), ("unknown", {})):
        run = report_run.read_run(write_run(tmp_path / name, whole_run(), environment=counted))
        (panel,) = [
            each
            for each in report_figures.panels([run])
            if each.name == "validation_masked_accuracy"
        ]
        drawn.append(report_figures.draw(panel, [run], "step"))
    assert drawn[0] != drawn[1]


def test_what_faults_and_saves_cost_is_in_the_table_and_what_a_killed_attempt_leaves_out_is_unknown(
    tmp_path,
):
    known = {
        "wall_s": 7200.0,
        "mttf_s": 3600.0,
        "suggested_interval_s": 42.4,
        "suggested_every": 25,
    }
    lines = [train_line(10), save_line(10), train_line(20)]
    lines += [
        fault_line(11, attempt=2, steps_lost=12, recover_s=30.0),
        save_line(15, attempt=2, stall_s=0.75),
    ]
    lines += [train_line(20, attempt=2), fault_line(21, attempt=3, steps_lost=3, recover_s=12.5)]
    lines += [
        summary_line(
            30, 10, attempt=3, goodput=0.875, skipped_steps=2, rollbacks=0, faults=2, **known
        )
    ]
    expected = {
        "Goodput": "87.5%",
        "Faults survived": "2",
        "Steps lost to faults": "15",
        "Time to recover from faults (s)": "42.5",
        "Mean time between faults (h:mm:ss)": "1:00:00",
        "Billable time: since the first start (h:mm:ss)": "2:00:00",
        "Steps skipped, gradient not finite": "2",
        "Rollbacks": "0",
        "Checkpoint stall (s per save)": "0.500",
        "Checkpoint size (MB)": "3.0",
        "checkpoint.every (steps)": "500",
        "Suggested checkpoint.every (steps)": "25",
        "Suggested time between saves (s)": "42.4",
    }
    config = {"checkpoint": {"every": 500}}
    assert expected.items() <= facts(write_run(tmp_path / "run", lines, config=config)).items()
    texts = facts(
        write_run(
            tmp_path / "killed", [*lines, train_line(40, attempt=4, since=30)], config=config
        )
    )
    # Goodput is that of the newest line; after the summary there may have been rollbacks.
    expected |= {
        "Goodput": "50.0%",
        "Rollbacks": "unknown",
        "Steps skipped, gradient not finite": "unknown",
    }
    del expected["Billable time: since the first start (h:mm:ss)"]
    assert expected.items() <= texts.items()
    short = whole_run(suggested_every=21_378)  # of 40 steps: a save at the end
    assert (
        facts(write_run(tmp_path / "short", short))["Suggested checkpoint.every (steps)"] == "40"
    )


# ---- labelled data and its evaluation ------------------------------------------------------------------------------


def records_of(run: Path) -> report_data.Records:
    records = report_run.read_run(run).records
    assert records is not None
    return records


def change(run: Path, name: str, **changes: Any) -> None:
    (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **changes}))


def test_data_and_evaluation_of_a_run_are_shown(tmp_path):
    run = finished_run.write(tmp_path / "run")
    assert report_command.main([str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    for text in (
        "Bad rows, left out 2 0",
        "Left out by data.label_map 7 0",
        "Padding (share of all tokens) 25.0% 37.5%",
        "positive 100 (10.0%) 20 (20.0%)",  # training first, whatever the file's order
        "Evaluation at step 20",
        "neutral 0.7000 0.8000 0.7467 30",
        "accuracy 0.8100 0.6600",
        "tweets.csv:99: &lt;b&gt;?&lt;/b&gt;",
    ):
        assert text in shown(html)
    pngs = {path.stem for path in (run / "report").glob("*.png")}
    assert {"lengths_by_split", "confusion_validation"} <= pngs and "confusion_other" not in pngs


def test_figures_hold_the_numbers_of_the_files(tmp_path):
    records = records_of(finished_run.write(tmp_path / "run"))
    (steps,) = data_figures.length_steps(records).axes
    stairs = [patch.get_data() for patch in steps.patches]
    assert [list(each.values) for each in stairs] == [[0.1, 0.2, 0.3, 0.4]] * 2
    assert list(stairs[0].edges) == [0, 8, 16, 32, 64]
    # what is padded to
    assert {line.get_xdata()[0] for line in steps.lines if len(line.get_xdata())} == {
        32,
        64,
    }
    matrix, _ = data_figures.heat_map(records.evaluated[0]).axes
    assert matrix.images[0].get_array()[2].tolist() == [0.25, 0.25, 0.5]
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("predicted", "true")
    assert {text.get_text() for text in matrix.texts} >= {"44\n88%", "10\n50%"}


def test_question_answering_has_no_labels(tmp_path):
    run = finished_run.write(tmp_path / "run")
    split = {"rows": 120, "examples": 100, "label_counts": {}, "notes": {"cut_questions": 3.0}}
    change(run, "data.json", kind="qa", labels=[], splits={"train": split})
    metrics = {"exact_match": 71.5, "f1": 80.25, "loss": None, "perplexity": math.nan}
    change(
        run,
        "evaluation.json",
        splits={"validation": {"metrics": metrics, "threshold": -1.5, "windows": 1200}},
    )
    records = records_of(run)
    known = [
        ["exact match", "71.5000"],
        ["f1", "80.2500"],
        ["threshold", "-1.5000"],
        ["windows", "1,200"],
    ]
    assert report_data.metrics_table(records)[1:] == known
    assert ["Cut questions", "3"] in report_data.splits_table(records)
    assert [title for _, title, _ in data_figures.data_figures(records)] == []


DAMAGED = [
    ("data.json", "[1]", "expected a mapping"),
    ("data.json", '{"labels": [3]}', "labels[0] is 3, not a string"),
    (
        "evaluation.json",
        '{"splits": {"validation": {"per_class": {"a": {"f1": true}}}}}',
        "f1' is True",
    ),
]


@pytest.mark.parametrize(("name", "content", "said"), DAMAGED)
def test_damaged_files_on_the_data_are_rejected_by_name(tmp_path, capsys, name, content, said):
    run = finished_run.write(tmp_path / "run")
    (run / name).write_text(content)
    error = rejected(capsys, run)
    assert f"{run / name} is damaged: " in error and said in error
    assert not (run / "report").exists()


# ---- what it rejects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "tail", "damage", "said"),
    [
        ([], "", {}, "no lines yet"),
        ([], HALF, {}, "no lines yet"),
        (
            [],
            '{"kind": "train", "step": 1, "time_unix_s": 1}\n',
            {},
            "time_unix_s; an earlier version wrote others",
        ),
        (whole_run(), "", {"config.yaml": "a: [1"}, "config.yaml is damaged"),
        (whole_run(), "", {"environment.json": None}, "it is a folder, not a regular file"),
    ],
    ids=["empty", "half a line", "earlier version", "config", "unreadable"],
)
def test_what_is_no_run_is_rejected_and_nothing_written(
    tmp_path, capsys, lines, tail, damage, said
):
    run, good = (
        write_run(tmp_path / "run", lines, tail=tail),
        write_run(tmp_path / "good", whole_run()),
    )
    for name, content in damage.items():
        (run / name).unlink()
        (run / name).mkdir() if content is None else (run / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    error = rejected(capsys, good, run)
    assert str(run) in error and said in error
    assert sorted(tmp_path.rglob("*")) == before


def test_files_of_somebody_else_are_not_replaced(tmp_path, capsys):
    run = write_run(tmp_path / "run", whole_run())
    (tmp_path / "mine").mkdir()
    for name in ("training_loss.png", "report.html"):
        (tmp_path / "mine" / name).write_text("mine")
    error = rejected(capsys, run, "--output", tmp_path / "mine")
    assert (
        "mine contains files that no report wrote (training_loss.png, report.html); choose another folder"
        in error
    )
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["mine", "mine"]


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_its_cure(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    said = rejected(capsys, write_run(tmp_path / "run", whole_run()))
    assert name in said and "pip install 'baretrain[report]'" in said


# ---- runs in S3 ----------------------------------------------------------------------------------------------------


def test_a_run_in_s3_is_reported_here(bucket, tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    local = write_run(tmp_path / "albert", whole_run())
    (local / "samples.json").write_text(json.dumps({"step": 40, "samples": []}))
    for path in local.iterdir():
        bucket.put(f"runs/albert/{path.name}", path.read_bytes())
    folder, flags, before = bucket.location("runs/albert"), bucket.config().flags(), bucket.keys()
    assert report_command.main([f"{folder}/", *flags]) == 0
    html = tmp_path / "here/albert-report/report.html"
    assert f"report: {html}" in capsys.readouterr().out
    assert f"from {folder}" in shown(html.read_text())
    assert bucket.keys() == before
    assert report_command.main([folder, str(local), *flags]) == 0
    assert "Comparison of 2 runs" in (tmp_path / "here/report/report.html").read_text()
    capsys.readouterr()
    nothing = bucket.location("nothing")
    assert f"error: {nothing} is not a run folder: it has no metrics.jsonl" in rejected(
        capsys, nothing, *flags
    )
    monkeypatch.setattr("train.storage.s3_retry.ATTEMPTS", 1)
    bucket.proxy.set(Fault("status"))
    assert report_command.main([folder, *flags]) == 1
    assert "S3 answers 503" in capsys.readouterr().err


LONG, DEEP = "9" * 400, "[" * 140 + "]" * 140
FORGED = [  # a file, what is replaced in it, by what
    ("metrics.jsonl", '"train_s": 7200.0', f'"train_s": {LONG}'),
    ("metrics.jsonl", '"train_s": 7200.0', '"peak_bytes_of_ranks": ["a", 1]'),
    ("metrics.jsonl", '"time_unix_s": 1800000006.0', f'"time_unix_s": {LONG}'),
    ("metrics.jsonl", '"time_unix_s": 1800000007.0', '"time_unix_s": 1e300'),
    ("data.json", '"counts": [10, 20, 30, 40]', '"counts": [10]'),
    ("data.json", '"up_to": [8, 16, 32, 64]', '"up_to": [8, 16, 16, 64]'),
    ("data.json", '"up_to": [8, 16, 32, 64]', '"up_to": [8, NaN, 32, 64]'),
    ("data.json", '"rows": 100,', '"rows": 100, "rows": 99,'),
    ("evaluation.json", '"metrics": {"accuracy": 0.66}', '"pairs": {"a": [[1.0, 2.0], [3.0]]}'),
    ("evaluation.json", "[44, 4, 2]", "[44, 4, -2]"),
    ("evaluation.json", '"precision": 0.9', f'"precision": {LONG}'),
    ("environment.json", '"parameters": 1234567', f'"parameters": {DEEP}'),
    ("config.yaml", '"weight_decay": 0.01', f'"weight_decay": {DEEP}'),
]


@pytest.mark.parametrize(("name", "before", "after"), FORGED)
def test_a_forged_value_is_rejected_by_file_or_left_out(tmp_path, name, before, after):
    file = finished_run.write(tmp_path / "run") / name
    assert file.read_text().count(before) >= 1
    file.write_text(file.read_text().replace(before, after, 1))
    if name == "metrics.jsonl":
        assert report_run.read_run(tmp_path / "run").summary["least_rank_bytes"] in (None, 1)
    else:
        rejects(rf"{name} is damaged", report_run.read_run, tmp_path / "run")
