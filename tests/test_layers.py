"""The house rules that a machine can keep: who imports whom, where device libraries are, how long things get."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for package in ("train", "launch", "ami") for path in (ROOT / package).rglob("*.py"))

# A module imports from lower rows only, and from its own package. Types may come from anywhere (TYPE_CHECKING).
ROWS = [
    ["train.config", "train.launcher", "train.console", "train.progress"],
    ["train.untrusted", "train.launched"],
    ["train.s3_patience"],
    ["train.s3"],
    [
        "train.storage",
        "train.machine",
        "train.monitor_neuron",
        "train.host_memory",
        "train.board",
        "train.lines",
        "train.run_clock",
        "train.environment",
        "train.command",
        "train.help",
    ],
    ["train.ownership", "train.outcome"],
    [
        "train.cli",
        "train.hub_access",
        "train.run_folder",
        "train.preempt",
        "train.monitor",
        "train.lease",
        "train.watchdog",
    ],
    ["train.exported", "train.goodput", "train.notices", "train.stragglers"],
    ["train.together", "train.watchdog_process"],
    ["train.data", "train.models", "train.optim", "train.backend", "train.metrics"],
    ["train.tasks", "train.parallel", "train.report_run"],
    ["train.checkpoints"],
    ["train.report_data", "train.report_places"],
    ["train.report_figures"],
    ["train.card"],
    ["train.hub"],
    ["train.feed", "train.life", "train.recovery"],
    [
        "train.loop",
        "train.prepare",
        "train.report",
        "train.doctor",
        "train.precompile",
        "train.shards",
        "train.convert",
        "train.records",
        "train.predict",
    ],
    ["train.attempt"],
    ["train.__main__"],
]
ONLY_IN = {  # heavy or device libraries, and the files that may import them
    "torch_xla": {"train/backend/xla.py"},
    "boto3": {"train/s3.py", "train/doctor/checks_s3.py", "launch/ec2.py"},
    "psutil": {"train/machine.py", "train/monitor.py", "train/doctor/checks.py"},
    "pynvml": {"train/monitor.py", "train/doctor/checks.py"},
    "matplotlib": {"train/report_figures.py"},
    "jinja2": {"train/report.py"},
    "huggingface_hub": {"train/hub.py", "train/card.py", "train/hub_access.py"},
    "sklearn": {"train/tasks/scores.py"},
    "hydra": {"train/cli.py"},
    "transformers": {
        "train/data/tokenizer.py",
        "train/models/encoder.py",
        "train/models/layers.py",
        "train/models/flops.py",
        "train/models/heads.py",
        "train/models/pretrained.py",
        "train/models/source.py",
    },
}
MAX_FILE, MAX_FUNCTION = 350, 60  # lines
LONGER = {  # named exceptions, each with its reason
    "train/config.py": "every setting of the project, with its meaning",
    "train/loop.py:fit": "the training loop, to be read in one piece",
}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Modules imported at run time, wherever the import stands."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # imports for types only do not count
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def row(module):
    for number, names in enumerate(ROWS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return None


def package(module):
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    module = name_of(path)
    for imported in imports(path):
        if imported.startswith("train.") and row(imported) is not None and row(module) is not None:
            same = package(imported) == package(module)
            assert same or row(imported) < row(module), f"{module} imports {imported}"
        if module.startswith("train"):
            assert imported.split(".")[0] not in ("launch", "ami"), f"{module} imports {imported}"


def test_every_module_has_its_row():
    missing = [name_of(path) for path in FILES if name_of(path).startswith("train.") and row(name_of(path)) is None]
    assert not missing


@pytest.mark.parametrize("library", ONLY_IN)
def test_heavy_libraries_stay_in_their_files(library):
    users = {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(name == library or name.startswith(f"{library}.") for name in imports(path))
    }
    assert users <= ONLY_IN[library]


def test_device_names_stay_in_the_backends():
    for path in FILES:
        text = path.read_text()
        if "backend" not in path.parts and path.name != "config.py":
            for word in ('"cuda"', '"nccl"', '"gloo"', '"xla"'):
                assert word not in text, f"{path} names {word}"


def test_files_and_functions_stay_short():
    for path in FILES:
        place, text = str(path.relative_to(ROOT)), path.read_text()
        assert len(text.splitlines()) <= MAX_FILE or place in LONGER, place
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno
                assert length <= MAX_FUNCTION or f"{place}:{node.name}" in LONGER, f"{place}:{node.name} {length}"


def test_public_functions_say_what_they_do():
    """At least the modules; the style guide asks for more."""
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
