"""The report: what it says of a run folder, what it refuses, and that it stays one harmless file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finished_run
import pytest
from s3_fixtures import Bucket
from services.fault_proxy import Fault

from train import report, report_data, report_figures, report_run

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

BATCH, SEQ_LEN, STEP_S = 32, 64, 0.5
TOKENS_PER_STEP = BATCH * SEQ_LEN
CONFIG = {
    "run_dir": "runs/a",
    "seed": 0,
    "global_batch_size": BATCH,
    "seq_len": None,
    "max_steps": 40,
    "task": {"kind": "mlm"},
    "model": {"architecture": "albert", "num_layers": 2, "hidden_size": 64},
    "optim": {"name": "adamw", "lr": 0.001},
    "backend": {"name": "auto", "precision": "auto"},
    "instance": {"name": "local", "usd_per_hour": None, "source": "https://example.com/prices"},
}
ENVIRONMENT = {
    "parameters": 123456,
    "world_size": 2,
    "backend": "ddp",
    "precision": "fp32",
    "versions": {"torch": "2.9"},
}


def train_line(step: int, **more: Any) -> dict[str, Any]:
    line = {
        "kind": "train",
        "step": step,
        "loss": 9 - step / 10,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "examples": step * BATCH,
    }
    return {**line, "tokens_per_s": TOKENS_PER_STEP / STEP_S, "data_wait_s": 0.5, "step_s": STEP_S, **more}


def eval_line(step: int, **more: Any) -> dict[str, Any]:
    loss = 9 - step / 10
    metrics = {"loss": loss, "perplexity": 2**loss, "masked_accuracy": step / 100, "eval_s": 1.0}
    return {"kind": "eval", "step": step, "time_unix_s": 1.8e9, "examples": step * BATCH, **metrics, **more}


def summary_line(step: int, steps: int, **more: Any) -> dict[str, Any]:
    """The end of a life of some steps."""
    known = {"train_s": steps * STEP_S, "tokens": steps * TOKENS_PER_STEP, "mfu": None, "cost_usd": None}
    return {"kind": "summary", "step": step, "steps_total": 40, "world_size": 2, "reason": "done", **known, **more}


def whole_run(**summary: Any) -> list[dict[str, Any]]:
    steps = range(10, 50, 10)
    lines = [line for step in steps for line in (train_line(step), eval_line(step))]
    save = {"kind": "checkpoint", "step": 40, "save_s": 1.5, "bytes": 10}
    return [*lines, save, summary_line(40, 40, unigram_entropy=7.5, **summary)]


def write_run(
    folder: Path, lines: list[dict[str, Any]], *, config: dict[str, Any] | None = None, tail: str = ""
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({**CONFIG, **(config or {})}))  # JSON is YAML
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def summarise(folder: Path, lines: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return report.summarise(report_run.read_run(write_run(folder, lines, **more)))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command line says as it refuses."""
    assert report.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_report_is_one_file_that_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", whole_run())
    assert report.main([str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    images = [path for path in (run / "report").iterdir() if path.suffix == ".png"]
    assert {path.stem for path in images} >= {"loss", "learning_rate", "throughput", "data_wait", "grad_norm"}
    sources = re.findall(r"""(?:src|href|srcset|data|action)\s*=\s*["']?([^"'\s>]+)""", html)
    assert len(sources) == len(images)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<script|<link|<iframe|@import|url\(", html)
    assert "https://example.com/prices" in html  # a value of the configuration is shown, not loaded
    assert {path.suffix for path in (run / "report").iterdir()} == {".png", ".html"}
    assert str(run / "report" / "report.html") in capsys.readouterr().out


def test_the_terminal_table_is_aligned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, whole_run()) for name in ("a-rather-long-name", "b")]
    assert report.main([str(run) for run in runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[: lines.index("")]
    column = table[0].index("a-rather-long-name")
    assert all(line[column - 1] == " " and line[column] != " " for line in table)
    assert any(line.split() == ["Parameters", "123,456", "123,456"] for line in table)


def test_several_runs_are_compared_beside_the_first(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", whole_run())
    other = {"optim": {"name": "lamb", "lr": 0.001}, "run_dir": "runs/b", "extra": 1}
    second = write_run(tmp_path / "b", whole_run(), config=other)
    runs = [report_run.read_run(first), report_run.read_run(second)]
    assert report.config_differences(runs) == [["extra", "-", "1"], ["optim.name", "adamw", "lamb"]]
    assert report.main([str(first), str(second)]) == 0
    html = (tmp_path / "report" / "report.html").read_text()
    differences = html.split("Configuration differences")[1].split("<h2>")[0]
    assert "optim.name" in differences and "lamb" in differences and "optim.lr" not in differences
    assert not (first / "report").exists()


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [report_run.read_run(write_run(tmp_path / name / "run", whole_run())) for name in "ab"]
    assert report.labels(runs) == [str(Path("a/run")), str(Path("b/run"))]


def test_curves_of_different_batches_go_by_sequences(tmp_path: Path) -> None:
    first = report_run.read_run(write_run(tmp_path / "a", whole_run()))
    second = report_run.read_run(write_run(tmp_path / "b", whole_run(), config={"global_batch_size": 2 * BATCH}))
    assert (report_figures.x_axis([first]), report_figures.x_axis([first, second])) == ("step", "examples")


def test_hostile_names_and_values_are_escaped(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\"'&$x^{$"
    config = {"optim": {"name": f"</details><script>{evil}"}, "task": {"kind": evil}}
    lines = [eval_line(1, **{f"{evil}accuracy": 0.5}), {"kind": "fault", "step": 1, "reason": evil}, *whole_run()]
    runs = [write_run(tmp_path / name, lines, config=config) for name in (evil, f"_{evil}\x1b[31m")]
    (runs[0] / "environment.json").write_text(json.dumps({"host": f"{evil}\ud800", evil: evil}))
    for chosen in (runs[:1], runs):
        assert report.main([str(run) for run in chosen] + ["--output", str(tmp_path / "out")]) == 0
        html = (tmp_path / "out" / "report.html").read_text()
        assert "<script" not in html and "<img src=x" not in html and "\x1b" not in html
        assert "&lt;img src=x onerror=alert(1)&gt;" in html
        assert all(re.fullmatch(r"[A-Za-z0-9_]+\.(png|html)", path.name) for path in (tmp_path / "out").iterdir())


def test_a_report_on_100000_lines_stays_below_a_megabyte(tmp_path: Path) -> None:
    lines = [train_line(step, loss=9 - step % 97 / 50, data_wait_s=step % 89 / 999) for step in range(1, 100_001)]
    run = report_run.read_run(write_run(tmp_path / "run", lines))
    html = report.render([run], tmp_path / "out")
    assert html.stat().st_size < 1_000_000


def test_a_long_curve_is_thinned_without_losing_a_spike() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    values = [1.0] * 77_777 + [50.0] + [1.0] * 22_222
    report_figures.curve(axes, list(range(100_000)), values, band=True, color="#000000")
    drawn: Any = axes.lines[0].get_xdata()
    assert 100 <= len(drawn) <= report_figures.MAX_POINTS
    assert axes.dataLim.y1 == 50.0


def test_a_run_whose_name_begins_with_an_underscore_is_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    named: list[str] = []
    monkeypatch.setattr(Figure, "legend", lambda self, **_: named.extend(self.axes[0].get_legend_handles_labels()[1]))
    runs = [report_run.read_run(write_run(tmp_path / name, whole_run())) for name in ("_a", "b")]
    report_figures.draw(report_figures.PANELS[1], runs, "step")
    assert [name.strip() for name in named] == ["_a", "b"]


def test_the_report_never_imports_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", whole_run())
    code = (
        "import sys; from train.report import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    root = Path(report.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(run)], cwd=root, check=True, capture_output=True)


# ---- what it says --------------------------------------------------------------------------------------------------


def test_lines_that_a_resume_redid_are_dropped(tmp_path: Path) -> None:
    lines = [train_line(10), train_line(20, loss=99.0), eval_line(20, loss=99.0), train_line(30, loss=99.0)]
    lines += [train_line(20), eval_line(20), train_line(30)]
    run = report_run.read_run(write_run(tmp_path / "run", lines))
    assert [(line["step"], line["loss"]) for line in run.lines["train"]] == [(10, 8.0), (20, 7.0), (30, 6.0)]
    assert [(line["step"], line["loss"]) for line in run.lines["eval"]] == [(20, 7.0)]


def test_totals_are_over_all_lives_even_where_steps_went_backwards(tmp_path: Path) -> None:
    ends = [summary_line(20, 20, mfu=0.1, cost_usd=1.0, reason="SIGTERM"), summary_line(15, 5, mfu=0.5, cost_usd=2.0)]
    found = summarise(tmp_path / "run", [train_line(10), train_line(20), ends[0], train_line(15), ends[1]])
    assert (found["lives"], found["lives_without_summary"], found["steps"]) == (2, 0, 15)
    assert (found["train_s"], found["tokens"], found["cost_usd"]) == (25 * STEP_S, 25 * TOKENS_PER_STEP, 3.0)
    assert found["mfu"] == pytest.approx((0.1 * 20 + 0.5 * 5) / 25)
    assert found["tokens_per_s"] == pytest.approx(TOKENS_PER_STEP / STEP_S)


@pytest.mark.parametrize(("saved", "redone"), [(20, True), (30, False)])
def test_a_killed_life_counts_by_its_train_lines(tmp_path: Path, saved: int, redone: bool) -> None:
    lines = [train_line(step) for step in (10, 20, 30)]
    lines.insert(saved // 10, {"kind": "checkpoint", "step": saved, "save_s": 1.0})
    lines += [train_line(step) for step in ((30, 40) if redone else (40,))]
    found = summarise(tmp_path / "run", [*lines, summary_line(40, 40 - saved, cost_usd=2.0)])
    assert (found["lives"], found["lives_without_summary"]) == (2, 1)
    assert (found["train_s"], found["tokens"]) == ((30 + 40 - saved) * STEP_S, (30 + 40 - saved) * TOKENS_PER_STEP)
    assert report.facts(found)["Cost"] == "at least $2.00"


def test_the_share_of_waiting_is_of_the_time_since_the_line_before(tmp_path: Path) -> None:
    lines = [train_line(10), train_line(30), {"kind": "checkpoint", "step": 25}, train_line(26)]
    run = report_run.read_run(write_run(tmp_path / "run", lines))
    shares = [report_figures.waiting_share(line) for life in run.lives for line in life if line["kind"] == "train"]
    assert shares == [0.5 / (10 * STEP_S), 0.5 / (20 * STEP_S), 0.5 / (1 * STEP_S)]


def test_unknown_mfu_and_cost_are_called_unknown_and_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", whole_run())
    assert report.main([str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    assert re.search(r"MFU</th>\s*<td class=\"unknown\">unknown</td>", html)
    assert re.search(r"Cost</th>\s*<td class=\"unknown\">unknown</td>", html)
    assert "MFU unknown: no peak FLOP/s is known for the instance local (instance.device_tflops_fp32)" in html
    assert "Cost unknown: no price is known for the instance local (instance.usd_per_hour)" in html
    assert "$" not in capsys.readouterr().out
    assert not (run / "report" / "mfu.png").exists()


def test_known_mfu_and_cost_are_shown(tmp_path: Path) -> None:
    texts = report.facts(summarise(tmp_path / "run", whole_run(mfu=0.4321, cost_usd=1234.5)))
    assert (texts["MFU"], texts["Cost"]) == ("43.2%", "$1,234.50")


def test_validation_loss_is_set_against_the_unigram_entropy(tmp_path: Path) -> None:
    run = report_run.read_run(write_run(tmp_path / "run", whole_run()))
    words = " ".join(re.sub(r"<[^>]+>", "", report.render([run], tmp_path / "out").read_text()).split())
    assert "Validation loss 5.000, unigram entropy of the corpus 7.500, i.e. 2.500 nats better" in words


def test_best_and_last_scores_are_of_all_metrics_and_of_nothing_else(tmp_path: Path) -> None:
    lines = [eval_line(10, f1=0.9, odd=3), eval_line(20, f1=0.4, odd=1), eval_line(30, loss=8.5, perplexity=None)]
    scores = summarise(tmp_path / "run", [train_line(10), *lines])["scores"]
    assert scores["loss"] == {"best": (7.0, 20), "last": (8.5, 30)}
    assert scores["perplexity"] == {"best": (2**7.0, 20), "last": (2**7.0, 20)}
    assert scores["f1"] == {"best": (0.9, 10), "last": (0.4, 20)}
    assert scores["odd"] == {"last": (1, 20)}  # nobody said which way is better
    assert set(scores) == {"loss", "perplexity", "masked_accuracy", "f1", "odd"}


def test_a_diverged_run_does_not_show_an_earlier_loss_as_its_last(tmp_path: Path) -> None:
    found = summarise(tmp_path / "run", [train_line(10), train_line(20, loss=None)])
    assert ["Final training loss", "unknown"] in report.table([found])


def test_sizes_left_open_by_the_configuration_come_from_the_run(tmp_path: Path) -> None:
    texts = report.facts(summarise(tmp_path / "run", whole_run()))
    assert (texts["Sequence length (tokens)"], texts["Backend"], texts["Precision"]) == (str(SEQ_LEN), "ddp", "fp32")
    assert (texts["Training time (h:mm:ss)"], texts["Steps planned"]) == ("0:00:20", "40")


def new_line(step: int, **more: Any) -> dict[str, Any]:
    """As `train_line`, of a version that saves the sums of a line with a checkpoint, and tells goodput."""
    return train_line(step, goodput=0.5, **more)


def save_line(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "checkpoint", "step": step, "save_s": 1.0, "stall_s": 0.25, "bytes": 3_000_000, **more}


def cost_line(resumed: int, steps_lost: int, recover_s: float) -> dict[str, Any]:
    """What a life says after its first step of the fault that ended the one before."""
    return {"kind": "fault", "step": resumed + 1, "reason": "lost", "steps_lost": steps_lost, "recover_s": recover_s}


def steps_of(folder: Path, lines: list[dict[str, Any]]) -> list[list[tuple[int, int, int]]]:
    """Step, own steps and steps of the window of each train line, by lives."""
    lives = report_run.read_run(write_run(folder, lines)).lives
    return [
        [(line["step"], line["own_steps"], line["window_steps"]) for line in life if line["kind"] == "train"]
        for life in lives
    ]


def test_the_life_after_a_stop_goes_on_with_the_sums_of_the_one_before(tmp_path: Path) -> None:
    first = [new_line(10), new_line(20), save_line(25), summary_line(25, 25, goodput=0.5, reason="SIGTERM")]
    lines = [*first, new_line(30), new_line(40), save_line(40)]
    assert steps_of(tmp_path / "a", lines) == [[(10, 10, 10), (20, 10, 10)], [(30, 5, 10), (40, 10, 10)]]
    found = summarise(tmp_path / "b", lines)
    assert (found["steps"], found["train_s"], found["tokens"]) == (40, 40 * STEP_S, 40 * TOKENS_PER_STEP)
    stopped = summarise(tmp_path / "c", first)
    assert (stopped["steps"], stopped["examples"]) == (25, 25 * BATCH)


def test_a_life_tells_where_it_went_on_though_it_redoes_no_line(tmp_path: Path) -> None:
    """Killed between a save, of which no line speaks yet, and the next line."""
    lines = [new_line(10), new_line(20), cost_line(28, 1, 7.0), save_line(29), new_line(30), new_line(40)]
    assert steps_of(tmp_path / "a", lines) == [[(10, 10, 10), (20, 10, 10)], [(30, 2, 10), (40, 10, 10)]]
    lines.append(summary_line(40, 12, goodput=0.5))
    found = summarise(tmp_path / "b", lines)
    assert (found["lives"], found["train_s"]) == (2, (20 + 12) * STEP_S)


@pytest.mark.parametrize("killed_at", [5, 6, 8])
def test_a_life_whose_first_line_comes_before_it_tells_of_the_fault(tmp_path: Path, killed_at: int) -> None:
    before = [new_line(step) for step in range(1, killed_at + 1)]
    lines = [*before, new_line(6), eval_line(6), cost_line(5, killed_at - 5, 7.0), save_line(5), new_line(7)]
    lives = steps_of(tmp_path / "run", lines)
    assert [[step for step, *_ in life] for life in lives] == [list(range(1, killed_at + 1)), [6, 7]]
    assert {steps[1:] for life in lives for steps in life} == {(1, 1)}


def test_a_save_that_is_told_late_does_not_move_the_start_of_a_life(tmp_path: Path) -> None:
    killed = [new_line(10), new_line(20), save_line(15)]
    lines = [*killed, cost_line(15, 5, 7.0), save_line(18), new_line(20), new_line(30)]
    assert steps_of(tmp_path / "run", lines) == [[(10, 10, 10), (20, 10, 10)], [(20, 5, 10), (30, 10, 10)]]


def test_a_rollback_redoes_steps_within_a_life(tmp_path: Path) -> None:
    alarms = [{"kind": "fault", "step": step, "reason": "3 steps in a row ..."} for step in (30, 15)]
    before = [new_line(10), save_line(15), new_line(20), new_line(30), *alarms]
    after = [new_line(step, examples=(step + 15) * BATCH) for step in (20, 30, 40)]
    ended = summary_line(40, 55, goodput=0.5, skipped_steps=3, rollbacks=1)
    lines = [*before, *after, ended]
    told = [(10, 10, 10), (20, 10, 10), (30, 10, 10), (20, 5, 10), (30, 10, 10), (40, 10, 10)]
    assert steps_of(tmp_path / "a", lines) == [told]
    found = summarise(tmp_path / "b", lines)
    assert (found["lives"], found["steps"], found["train_s"]) == (1, 40, 55 * STEP_S)
    assert (found["examples"], found["skipped_steps"], found["rollbacks"]) == (55 * BATCH, 3, 1)
    killed = summarise(tmp_path / "c", [*before, after[0]])
    assert (killed["lives"], killed["steps"], killed["train_s"]) == (1, 20, 35 * STEP_S)
    run = report_run.read_run(tmp_path / "b")
    assert [line["step"] for line in run.lines["train"]] == [10, 20, 30, 40]
    assert report_figures.points(run.lines["train"], report_figures.waiting_share, "step")[1] == [0.1] * 4


def test_what_faults_and_saves_cost_is_in_the_table(tmp_path: Path) -> None:
    told = {"wall_s": 7200.0, "mttf_s": 3600.0, "suggested_interval_s": 42.4, "suggested_every": 85}
    lines = [new_line(10), save_line(10), new_line(20), cost_line(10, 12, 30.0), save_line(15, stall_s=0.75)]
    lines += [new_line(20), cost_line(20, 3, 12.5), new_line(30)]
    ended = summary_line(30, 10, goodput=0.875, skipped_steps=2, rollbacks=0, faults=2, **told)
    run = write_run(tmp_path / "run", [*lines, ended], config={"checkpoint": {"every": 500}})
    texts = dict(report.table([report.summarise(report_run.read_run(run))]))
    assert texts["Goodput"] == "87.5%"
    assert (texts["Faults survived"], texts["Steps lost to them"]) == ("2", "15")
    assert texts["Time to recover from them (s)"] == "42.5"
    assert (texts["Mean time between them (h:mm:ss)"], texts["Time since the first start (h:mm:ss)"]) == (
        "1:00:00",
        "2:00:00",
    )
    assert (texts["Steps skipped, gradient not finite"], texts["Rollbacks"]) == ("2", "0")
    assert (texts["Checkpoint stall (s a save)"], texts["Checkpoint size (MB)"]) == ("0.500", "3.0")
    assert (texts["checkpoint.every (steps)"], texts["Suggested checkpoint.every (steps)"]) == ("500", "85")
    assert texts["Suggested time between saves (s)"] == "42.4"
    html = report.render([report_run.read_run(run)], tmp_path / "out").read_text()
    assert "Goodput is the share" in html and "the square root of 2" in html
    assert (tmp_path / "out" / "goodput.png").is_file()


def test_what_an_older_or_a_killed_run_does_not_tell_is_unknown(tmp_path: Path) -> None:
    new = ("Goodput", "Faults survived", "Steps lost to them", "Rollbacks", "Suggested checkpoint.every (steps)")
    old = summarise(tmp_path / "old", whole_run())
    assert not set(new) & {label for label, _ in report.table([old])}
    known = {"goodput": 0.9, "skipped_steps": 0, "rollbacks": 0, "suggested_every": 7}
    ended = summarise(tmp_path / "ended", [new_line(10), summary_line(10, 10, **known, mttf_s=None)])
    assert [report.facts(ended)[label] for label in new] == ["90.0%", "0", "0", "0", "7"]
    assert "Mean time between them (h:mm:ss)" not in dict(report.table([ended]))
    killed = [new_line(10), summary_line(10, 10, **known), new_line(20)]
    texts = report.facts(summarise(tmp_path / "killed", killed))
    # Goodput as of the newest line; since the summary there may have been rollbacks.
    assert [texts[label] for label in new] == ["50.0%", "0", "0", "unknown", "7"]
    assert ["Goodput", "unknown", "90.0%"] in report.table([old, ended])


def test_times_by_a_clock_that_was_set_back_are_unknown(tmp_path: Path) -> None:
    ended = summary_line(10, 10, goodput=1.0, wall_s=-3500.0, mttf_s=-1750.0)
    texts = report.facts(summarise(tmp_path / "run", [new_line(10), ended]))
    labels = ("Goodput", "Time since the first start (h:mm:ss)", "Mean time between them (h:mm:ss)", "Faults survived")
    assert [texts[label] for label in labels] == ["unknown", "unknown", "unknown", "0"]


# ---- labelled data and its evaluation ------------------------------------------------------------------------------


def records_of(run: Path) -> report_data.Records:
    found = report_data.read_records(run)
    assert found is not None
    return found


def change(run: Path, name: str, **changes: Any) -> None:
    (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **changes}))


def shown(html: str) -> str:
    """The words of a report."""
    return " ".join(re.sub(r"<[^>]+>", " ", html.split("<main>")[1]).split())


def test_data_and_evaluation_of_a_run_are_shown(tmp_path: Path) -> None:
    run = finished_run.write(tmp_path / "run")
    assert report.main([str(run)]) == 0
    html = (run / "report" / "report.html").read_text()
    words = shown(html)
    assert "Bad rows, left out 2 0" in words
    assert "Left out by data.label_map 7 0" in words
    assert "Padding, of all tokens 25.0% 37.5%" in words
    assert "positive 100 (10.0%) 20 (20.0%)" in words  # training first, whatever the file's order
    assert "Best evaluation, at step 20" in words
    assert "neutral 0.7000 0.8000 0.7467 30" in words
    assert "accuracy 0.8100 0.6600" in words
    assert "tweets.csv:99: &lt;b&gt;?&lt;/b&gt;" in words  # escaped
    pngs = {path.stem for path in (run / "report").glob("*.png")}
    assert {"labels", "lengths", "confusion_1"} <= pngs and "confusion_2" not in pngs
    assert html.count("data:image/png;base64,") == len(pngs)


def test_figures_hold_the_numbers_of_the_files(tmp_path: Path) -> None:
    records = records_of(finished_run.write(tmp_path / "run"))
    (bars,) = report_figures.label_bars(records).axes
    assert [round(bar.get_width(), 3) for bar in bars.patches] == [0.6, 0.3, 0.1, 0.5, 0.3, 0.2]
    (steps,) = report_figures.length_steps(records).axes
    stairs = [patch.get_data() for patch in steps.patches]
    assert [list(each.values) for each in stairs] == [[0.1, 0.2, 0.3, 0.4]] * 2
    assert list(stairs[0].edges) == [0, 8, 16, 32, 64]
    assert {line.get_xdata()[0] for line in steps.lines if len(line.get_xdata())} == {32, 64}  # what is padded to
    assert [label.strip() for label in steps.get_legend_handles_labels()[1]] == [
        "train, 25.0% padding",
        "validation, 37.5% padding",
        "padded to",
    ]
    matrix, _ = report_figures.heat_map(records.evaluated[0]).axes
    assert matrix.images[0].get_array()[2].tolist() == [0.25, 0.25, 0.5]
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("predicted", "true")
    assert {text.get_text() for text in matrix.texts} >= {"44\n88%", "10\n50%"}


def test_many_labels_stay_readable(tmp_path: Path) -> None:
    run = finished_run.write(tmp_path / "run")
    names, number = [f"label-{place}-{'x' * 60}" for place in range(90)], report_figures.MAX_LABELS
    matrix = [[int(row == column) for column in range(90)] for row in range(90)]
    split = {"label_counts": {name: place for place, name in enumerate(names)}}
    change(run, "data.json", labels=names, splits={"train": split})
    change(run, "evaluation.json", splits={"validation": {"labels": names, "confusion": matrix}})
    records = records_of(run)
    (bars,) = report_figures.label_bars(records).axes
    assert len(bars.patches) == number and f"of {len(names)} labels" in bars.get_title()
    assert max(len(label.get_text()) for label in bars.get_yticklabels()) <= 40
    assert not report_figures.heat_map(records.evaluated[0]).axes[0].texts
    assert report.main([str(run)]) == 0


def test_runs_are_compared_label_by_label(tmp_path: Path) -> None:
    runs = [finished_run.write(tmp_path / name) for name in ("a", "b")]
    runs.append(write_run(tmp_path / "pretraining", whole_run()))
    classes = {"negative": {"f1": 0.25}, "extra": {"f1": 1.0}}
    change(runs[1], "evaluation.json", splits={"validation": {"per_class": classes}})
    assert report.main([str(run) for run in runs]) == 0
    words = shown((tmp_path / "report" / "report.html").read_text())
    assert "F1 at the best evaluation a b pretraining validation: negative 0.8899 0.2500 unknown" in words
    assert "validation: extra unknown 1.0000 unknown" in words
    assert not (tmp_path / "report" / "labels.png").exists()


def test_a_run_without_such_files_is_shown_as_before(tmp_path: Path) -> None:
    run = report_run.read_run(write_run(tmp_path / "run", whole_run()))
    words = shown(report.render([run], tmp_path / "out").read_text())
    assert report_data.read_records(run.path) is None
    for word in ("Data", "Best evaluation", "Labels", "Bad rows"):
        assert f" {word} " not in words
    two = [run, report_run.read_run(write_run(tmp_path / "other", whole_run()))]
    assert "F1" not in shown(report.render(two, tmp_path / "both").read_text())


def test_question_answering_has_no_labels(tmp_path: Path) -> None:
    run = finished_run.write(tmp_path / "run")
    split = {"rows": 120, "examples": 100, "label_counts": {}, "notes": {"cut_questions": 3.0}}
    change(run, "data.json", kind="qa", labels=[], splits={"train": split})
    judged = {"metrics": {"exact_match": 71.5, "f1": 80.25, "loss": None}, "threshold": -1.5, "windows": 1200}
    change(run, "evaluation.json", splits={"validation": judged})
    assert report.main([str(run)]) == 0
    words = shown((run / "report" / "report.html").read_text())
    assert "exact match 71.5000 f1 80.2500 threshold -1.5000 windows 1,200" in words
    assert "Cut questions 3" in words and "Precision Recall" not in words
    assert not (run / "report" / "labels.png").exists()


DAMAGED = [
    ("data.json", "[1]", "expected a mapping"),
    ("data.json", "{", "Expecting"),
    ("data.json", '{"splits": [1]}', "splits holds [1], not dict"),
    ("data.json", '{"labels": [3]}', "labels holds 3, not str"),
    ("data.json", '{"splits": {"train": {"rows": "many"}}}', 'rows holds "many", not int'),
    ("data.json", '{"splits": {"train": {"rows": NaN}}}', "rows holds NaN"),
    ("data.json", '{"splits": {"train": {"length_histogram": {"up_to": [1], "counts": [1, 2]}}}}', "2 counts up to 1"),
    ("evaluation.json", '{"splits": {"validation": {"labels": ["a", "b"], "confusion": [[1, 2]]}}}', "is no square"),
    ("evaluation.json", '{"splits": {"validation": {"per_class": {"a": {"f1": true}}}}}', "a.f1 holds true"),
]


@pytest.mark.parametrize(("name", "content", "said"), DAMAGED)
def test_damaged_words_on_the_data_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    run = finished_run.write(tmp_path / "run")
    (run / name).write_text(content)
    found = refused(capsys, run)
    assert f"{run / name} is damaged: " in found and said in found
    assert not (run / "report").exists()


# ---- what it refuses -----------------------------------------------------------------------------------------------


def test_a_half_written_last_line_is_ignored(tmp_path: Path) -> None:
    lines = [train_line(10), train_line(20)]
    run = report_run.read_run(write_run(tmp_path / "run", lines, tail='{"kind": "train", "step": 30, "lo'))
    assert [line["step"] for line in run.lines["train"]] == [10, 20]


@pytest.mark.parametrize("broken", ['{"kind": "tr', "[1]", '{"step": 1}', '{"kind": "train", "step": null}'])
def test_a_broken_line_in_the_middle_is_refused_by_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    tail = f"{broken}\n{json.dumps(train_line(20))}\n"
    run = write_run(tmp_path / "run", [train_line(10)], tail=tail)
    assert f"{run / 'metrics.jsonl'} line 2 " in refused(capsys, run)
    assert not (run / "report").exists()


@pytest.mark.parametrize("what", ["missing", "a file", "no run", "empty", "half a line", "bad config", "unreadable"])
def test_what_is_no_run_is_refused_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    run, good = tmp_path / "run", write_run(tmp_path / "good", whole_run())
    if what == "a file":
        run.touch()
    elif what == "no run":
        run.mkdir()
    elif what != "missing":
        write_run(run, [] if what in ("empty", "half a line") else whole_run(), tail='{"kin' if "half" in what else "")
    if what == "bad config":
        (run / "config.yaml").write_text("a: [1")
    elif what == "unreadable":
        (run / "environment.json").unlink()
        (run / "environment.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert str(run) in refused(capsys, good, run)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_that_cannot_be_written_leaves_the_old_one_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", whole_run())
    (run / "report").mkdir()
    (run / "report" / "report.html").write_text("<title>Training report: old")

    def no_space(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    assert "No space left" in refused(capsys, run)
    assert [path.read_text() for path in (run / "report").iterdir()] == ["<title>Training report: old"]


def test_files_of_somebody_else_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", whole_run())
    (tmp_path / "mine").mkdir()
    for name in ("loss.png", "report.html"):
        (tmp_path / "mine" / name).write_text("mine")
    told = refused(capsys, run, "--output", tmp_path / "mine")
    assert "mine holds loss.png, report.html of no report; --output names another folder" in told
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["mine", "mine"]


def test_an_output_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", whole_run())
    (tmp_path / "out").write_text("mine")
    refused(capsys, run, "--output", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = write_run(tmp_path / "run", whole_run())
    monkeypatch.setitem(sys.modules, name, None)
    said = refused(capsys, run)
    assert name in said and "pip install 'baretrain[report]'" in said


# ---- runs in S3 ----------------------------------------------------------------------------------------------------


@pytest.fixture
def in_s3(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Writes a run there, with the current folder elsewhere; gives its place and the flags."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def put(name: str, **files: str) -> list[str]:
        run = write_run(tmp_path / name, whole_run())
        for path, content in files.items():
            (run / f"{path}.json").write_text(content)
        for path in run.iterdir():
            bucket.put(f"runs/{name}/{path.name}", path.read_bytes())
        return [bucket.location(f"runs/{name}"), *bucket.config().flags()]

    return put


def test_a_run_in_s3_is_reported_here(
    bucket: Bucket, in_s3: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, *flags = in_s3("albert")
    before = bucket.keys()
    assert report.main([f"{place}/", *flags]) == 0
    html = tmp_path / "here/albert-report/report.html"
    assert f"report: {html}" in capsys.readouterr().out
    assert f"from {place}" in shown(html.read_text())
    assert bucket.keys() == before
    assert report.main([place, *flags, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/report.html").is_file()


def test_runs_in_s3_and_on_disk_are_compared(in_s3: Callable[..., list[str]], tmp_path: Path) -> None:
    place, *flags = in_s3("one")
    other, *_ = in_s3("two")
    local = write_run(tmp_path / "three", whole_run())
    assert report.main([place, other, str(local), *flags]) == 0
    words = shown((tmp_path / "here/report/report.html").read_text())
    assert all(name in words for name in ("one", "two", "three"))


def test_a_place_in_s3_that_is_no_run_or_damaged_is_named(
    bucket: Bucket, in_s3: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    place, *flags = in_s3("bad", data="[1]")
    assert f"error: {place}/data.json is damaged: expected a mapping" in refused(capsys, place, *flags)
    nothing = bucket.location("nothing")
    assert f"error: {nothing} is not a run folder: it holds no metrics.jsonl" in refused(capsys, nothing, *flags)
    assert "is not a folder in S3" in refused(capsys, f"{place}/../../x", *flags)
    assert "there is no bucket nowhere" in refused(capsys, "s3://nowhere/run", *flags)
    assert list(Path.cwd().iterdir()) == []


def test_a_silent_s3_is_a_failure_and_no_refusal(
    bucket: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.s3_patience.ATTEMPTS", 1)
    bucket.proxy.set(Fault("status"))
    assert report.main([bucket.location("run"), *bucket.config().flags()]) == 1
    assert re.fullmatch(r"error: s3://.*: S3 answers 503 SlowDown; try again later\n", capsys.readouterr().err)
