"""The repository speaks in the field's terms: words that once stood for other things do not come back."""

import re
import subprocess
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


def test_words_of_the_house_are_gone():
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = []
    for name in names:
        is_text = Path(name).suffix in {".py", ".md", ".yaml", ".sh", ".j2", ".hcl", ".toml"} or name == "Makefile"
        if not is_text or name.startswith("tests/recorded/") or name == "tests/house/test_words.py":
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if match := WORDS.search(ALLOWED.sub("", line)):
                found.append(f"{name}:{number}: {match.group()}")
    assert not found, "\n".join(found)
