"""The report's pages in a real browser, headless Chromium: as wide as a desktop and as a telephone, light and dark; and
the site of README and docs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import finished_run
import pytest
from reported_runs import fault_line, summary_line, train_line, whole_run, write_run
from running import ROOT
from services import browser

from train.tools import report as report_command

WIDTHS = (400, 1300)
LONG = "a-name-of-a-run-that-somebody-made-from-all-its-settings-lr=0.001-batch=4096-seed=17"
# What a reader cannot get at: a page wider than the screen, text or boxes that lie outside all that scrolls, a second
# run that lies there, text that is too small; and what looks wrong: an empty card, a number without its sign.
FAULTS = """
const faults = [];
const width = document.documentElement.clientWidth;
const whole = document.scrollingElement.scrollWidth;
if (whole > width) faults.push(`the page is ${whole} wide`);
for (const each of document.querySelectorAll("main *")) {
  const box = each.getBoundingClientRect();
  if (box.width && (box.right > width + 1 || box.left < -1) && !each.closest(".scroll"))
    faults.push(`${each.tagName} ends at ${box.right}: ${each.textContent.trim().slice(0, 40)}`);
}
for (const each of document.querySelectorAll(".scroll")) {
  if (each.scrollWidth > each.clientWidth && getComputedStyle(each).overflowX != "auto")
    faults.push("a table is cut off: " + each.textContent.trim().slice(0, 40));
}
for (const each of document.querySelectorAll(".runs"))
  if (each.scrollWidth > each.parentElement.clientWidth + 1 && each.querySelectorAll("thead th").length < 3)
    faults.push("a run lies outside: " + each.textContent.trim().slice(0, 40));
for (const each of document.images) {
  const size = 9 * each.clientWidth / (each.naturalWidth / 200 * 72);  // of 9 points at 200 dots per inch
  if (each.naturalWidth && size < 8.9) faults.push(`text of ${size.toFixed(1)} px: ${each.alt}`);
}
for (const each of document.querySelectorAll(".tile")) {
  const empty = each.getBoundingClientRect().bottom - each.lastElementChild.getBoundingClientRect().bottom;
  if (empty > 20) faults.push(`${empty} px of a card are empty: ${each.textContent.trim().slice(0, 40)}`);
}
for (const each of document.querySelectorAll(".share, .ratio"))
  if (each.getClientRects().length > 1) faults.push("broken between number and sign: " + each.textContent);
for (const each of document.querySelectorAll("td, th, summary, .figure, .sample"))
  if (each.scrollWidth > each.clientWidth + 1 && each.getBoundingClientRect().width)
    faults.push("text leaves its cell: " + each.textContent.trim().slice(0, 40));
return faults;
"""
UNDRAWN = "return [...document.images].filter(each => !(each.complete && each.naturalWidth)).map(each => each.alt)"
FROM_ELSEWHERE = """
return performance.getEntriesByType("resource").map(each => each.name).filter(each => !each.startsWith(location.origin))
"""
# A page wider than the screen, a key that breaks inside, code that is cut off, and ways in that do not stand in a line.
SITE_FAULTS = """
const faults = [];
const width = document.documentElement.clientWidth;
if (document.scrollingElement.scrollWidth > width) faults.push("the page is wider than the screen");
for (const each of document.querySelectorAll("td code"))
  if (/^[\\w.]+$/.test(each.textContent) && each.getClientRects().length > 1) faults.push("broken: " + each.textContent)
for (const each of document.querySelectorAll("pre > code"))
  if (each.scrollWidth > each.clientWidth && getComputedStyle(each).overflowX != "auto")
    faults.push("cut off: " + each.textContent.slice(0, 40));
const tops = new Set([...document.querySelectorAll(".grid.cards li")].map(each => each.getBoundingClientRect().top));
if (tops.size > 1 && width > 1000) faults.push("the ways in stand in several lines");
return faults;
"""
# The contrast of each text with what lies behind it: WCAG 2.2, "relative luminance" and criterion 1.4.3.
FAINT = """
function rgb(color) { return color.match(/[\\d.]+/g).map(Number); }
function luminance([r, g, b]) {
  const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
}
function behind(each) {
  for (; each; each = each.parentElement) {
    const color = rgb(getComputedStyle(each).backgroundColor);
    if (color.length == 3 || color[3] == 1) return color;
  }
  return [255, 255, 255];
}
const faint = new Set();
for (const each of document.querySelectorAll("main *")) {
  if (![...each.childNodes].some(node => node.nodeType == 3 && node.textContent.trim())) continue;
  const [a, b] = [luminance(rgb(getComputedStyle(each).color)), luminance(behind(each))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) faint.add(`${ratio.toFixed(1)} ${each.tagName}: ${each.textContent.trim().slice(0, 40)}`);
}
return [...faint];
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    pytest.importorskip("selenium")
    if missing := [name for name in browser.PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    with browser.chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the reports on a fine-tuning with its data and samples, and on four runs, one of them with faults."""
    folder = tmp_path_factory.mktemp("pages")
    lines = [*whole_run()[:-1], fault_line(40), train_line(50), summary_line(50, 50)]
    tuned = finished_run.write(folder / "tuned")
    changed = {"path": "x" * 300, "optim": {"name": "lamb"}}
    runs = [write_run(folder / "a", lines), write_run(folder / LONG, lines), tuned]
    runs.append(write_run(folder / "b", whole_run(), config=changed))
    guesses = [{"text": f"{name} is likely", "probability": 0.333} for name in ("this", "that")]
    answer = {"truth": "this", "score": 1.0, "guesses": guesses}
    sample = {"text": "a [1] text", "context": "", "answers": [answer]}
    (tuned / "samples.json").write_text(json.dumps({"step": 30, "samples": [sample]}))
    assert report_command.main([str(tuned)]) == 0
    output = folder / "compared"
    assert report_command.main([*map(str, runs), "--output", str(output)]) == 0
    return {
        "tuned": tuned / "report" / "report.html",
        "compared": output / "report.html",
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["tuned", "compared"])
def test_a_page_is_whole(
    chromium: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.show(chromium, pages[name], width=width, scheme=scheme)
    # no script that fails, nothing that the page's own policy blocks
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return document.images.length") >= 6
    assert chromium.execute_script(UNDRAWN) == []
    assert chromium.execute_script(FAULTS) == []
    assert chromium.execute_script(FAINT) == []
    dark = (
        chromium.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(13, 16, 20)"
    )
    assert dark == (scheme == "dark")


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of what `make docs` builds, which fails for a link that leads nowhere."""
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        ["make", "--old-file=.venv/.ready", "--old-file=.venv/.ready-tests", "docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    folder = ROOT / "build" / "site"
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_site_of_the_pages(chromium: Any, site: str) -> None:
    chromium.get_log("browser")
    names = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {page.stem for page in (ROOT / "build" / "site" / "docs").glob("*.html")} == names
    for page in ("index", *(f"docs/{name}" for name in sorted(names))):
        for width in WIDTHS:
            browser.show(chromium, f"{site}/{page}.html", width=width)
            assert chromium.get_log("browser") == [], page
            assert chromium.execute_script(FROM_ELSEWHERE) == [], page
            assert chromium.execute_script(UNDRAWN) == [], page
            assert chromium.execute_script(SITE_FAULTS) == [], (page, width)
