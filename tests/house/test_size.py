"""A ratchet: size, density and conditional expressions stay at or below what is written here.

Size is counted in nodes of Python's syntax tree without docstrings, which squeezing does not change. A change that
needs more raises a number here, in a commit that says for what.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
MOST_NODES = {
    "train/config": 7_800,
    "train/machine": 9_000,
    "train/storage": 12_800,
    "train/run_folder": 6_900,
    "train/data": 59_350,
    "train/models": 13_050,
    "train/parallel": 27_450,
    "train/tasks": 22_000,
    "train/checkpoints": 9_500,
    "train/observe": 21_000,
    "train/run": 20_200,
    "train/tools": 21_800,
    "train": 237_400,
    "launch": 31_200,
    "ami": 3_800,
    "benchmarks": 25_600,
    "tests": 255_900,
}
MOST_NODES_PER_LINE = 8.6
MOST_CONDITIONALS = 7.0  # conditional expressions per 1,000 lines of code
MOST_LONG_LINES = 0.02  # the share of lines of at least LONG columns
LONG = 100


class Size(NamedTuple):
    nodes: int
    lines: int
    conditionals: int
    long_lines: int


def docstrings(tree: ast.AST) -> set[int]:
    """Numbers of the lines of docstrings."""
    found = set[int]()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
            continue
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update(range(value.lineno, (value.end_lineno or 0) + 1))
    return found


@cache
def size_of(path: Path) -> Size:
    text = path.read_text()
    tree = ast.parse(text)
    of_docs = docstrings(tree)
    nodes = conditionals = lines = long_lines = 0
    for node in ast.walk(tree):
        is_doc = isinstance(node, ast.Expr | ast.Constant) and node.lineno in of_docs
        nodes += not is_doc
        conditionals += isinstance(node, ast.IfExp)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.strip().startswith("#") and number not in of_docs:
            lines += 1
            long_lines += len(line) >= LONG
    return Size(nodes, lines, conditionals, long_lines)


def size_of_all(*folders: str) -> Size:
    sizes = [size_of(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return Size(*map(sum, zip(*sizes, strict=True)))


@pytest.mark.parametrize("folder", MOST_NODES)
def test_no_part_grows_unnoticed(folder):
    assert size_of_all(folder).nodes <= MOST_NODES[folder]


def test_every_part_is_counted():
    packages = {path.parent for path in (ROOT / "train").glob("*/__init__.py")}
    assert {str(path.relative_to(ROOT)) for path in packages} <= MOST_NODES.keys()


def test_code_breathes():
    size = size_of_all("train", "launch", "ami")
    assert size.nodes / size.lines <= MOST_NODES_PER_LINE
    assert size.conditionals / size.lines * 1000 <= MOST_CONDITIONALS
    assert size.long_lines / size.lines <= MOST_LONG_LINES
