"""The repository speaks in the field's terms, in whole statements: ruff's D rules keep the form of docstrings."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WORDS = re.compile(
    r"\b(doors?|rooms?|verbs?|hello|beats?|meets?|put_aside|put aside|gate|supply|gives(?! up)|refus\w+)\b"
    r"|\.share\(",
    re.IGNORECASE,
)
# Settings that users type, values and folders of recorded files, and the words of others.
ALLOWED = re.compile(
    r"\bgate: |\"gate\"|gate/|cluster\.gate|attempt_ended, gate|\"beats\"|"
    r"\"refused\"|`refused`|(stopped|failed)(, | \| )refused|Connection \(?refused"
)
IDIOMS = re.compile(r"\bgo(es|ing)? on\b|\banother (\w+ )?than\b|\bat once\b|\bas many\b")
QUESTIONS = re.compile(r"(Whether|What|How|Which|Who|Whose|Why)\b")
NO_VERB = re.compile(r"(The|A|An|Whether|What|How|All|Every|Each|Some|As|InputError|BadContent)\b")
OWN = re.compile(r"\b(?:its|their|our|\w+'s?) own\b")
MOST_OWN = 2  # of a file's docstrings and comments: "own" says nothing, the owner's name does
PRIVATE = ("attempt", "owner", "fence", "identity", "piece")


def tracked(*folders: str) -> list[str]:
    command = ["git", "ls-files", *folders]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Constant]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node, value


def comments(source: str) -> dict[int, str]:
    """Comments by their first line; one that continues on the next lines is one text."""
    texts, last, at = dict[int, str](), -1, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            begins = token.line[: token.start[1]].strip() or token.start[0] != last + 1
            at = token.start[0] if begins else at
            texts[at] = f"{texts.get(at, '')} {token.string.lstrip('# ')}".strip()
            last = token.start[0]
    return texts


def faults_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each fault in a module's docstrings, comments and messages."""
    tree = ast.parse(source)
    found = list(docstrings(tree))
    prose = [(value.lineno, " ".join(str(value.value).split())) for _, value in found] + list(
        comments(source).items()
    )
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for node, value in found:
        text = str(value.value)
        is_property = any(
            "property" in ast.unparse(each) for each in getattr(node, "decorator_list", ())
        )
        if isinstance(node, ast.FunctionDef) and not is_property and NO_VERB.match(text):
            yield value.lineno, text[:40]
    for line, text in prose:
        for sentence in re.split(r"(?<=[.!?:;]) (?=[A-Z])", text):
            if QUESTIONS.match(sentence):
                yield line, sentence[:40]
        if match := re.search(r"\w*Error for\b", text):
            yield line, match.group()
    for line, text in [*prose, *((node.lineno, node.value) for node in strings)]:
        if match := IDIOMS.search(" ".join(text.split())):
            yield line, match.group()
    if sum(len(OWN.findall(text)) for _, text in prose) > MOST_OWN:
        yield 1, f"more than {MOST_OWN} times own"


def test_words_of_the_house_are_gone():
    found = []
    for name in tracked():
        is_text = (
            Path(name).suffix in {".py", ".md", ".yaml", ".sh", ".j2", ".hcl", ".toml"}
            or name == "Makefile"
        )
        if (
            not is_text
            or name.startswith("tests/recorded/")
            or name == "tests/house/test_words.py"
        ):
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if match := WORDS.search(ALLOWED.sub("", line)):
                found.append(f"{name}:{number}: {match.group()}")
    assert not found, "\n".join(found)


def test_docstrings_comments_and_messages_are_whole_statements():
    names = [
        name for name in tracked("train", "launch", "ami", "benchmarks") if name.endswith(".py")
    ]
    found = [
        f"{name}:{line}: {words}"
        for name in names
        for line, words in sorted(faults_of((ROOT / name).read_text()))
    ]
    assert len(names) > 100 and not found, "\n".join(found)


def test_faults_of_words_are_found():
    bad = '''
def size(x):
    """Whether it fits. InputError for a bad one."""
    return x  # What the others
    # of the machine hold
message = "the run goes on, at once"
'''
    assert [line for line, _ in faults_of(bad)] == [3, 3, 3, 4, 6]
    good = 'def size(x):\n    """Return whether it fits. Raises InputError if not."""\n'
    assert list(faults_of(good)) == []


def test_private_words_have_an_entry():
    entries = re.findall(
        r"^\| (\w+) \| \w+", (ROOT / "docs/how-it-works.md").read_text(), re.MULTILINE
    )
    assert set(PRIVATE) <= set(entries)
