"""The house rules that a machine can keep: who imports whom, where device libraries are, how long things get."""

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

from running import train_overrides

ROOT = Path(__file__).parent.parent.parent
FILES = sorted(
    path for package in ("train", "launch", "ami") for path in (ROOT / package).rglob("*.py")
)

# Bottom to top: a package imports from those before it, and from itself. Types may come from anywhere (TYPE_CHECKING).
# Entry points of the commands, and what a run starts with, stand in train/ itself.
PACKAGES = "config machine storage run_folder data models parallel tasks checkpoints observe run tools".split()
FRONT = "loop entry api __main__".split()
# of the package data, in their order
DATA = "random_bits files shards text batches records".split()
LEVELS = [*PACKAGES[:-1], "loop", "entry", "tools", "__main__"]
TOOLS = "train.tools train.observe.report train.observe.card train.observe.push".split()
# Of train, without torch: exactly these, or what is in these.
FOR_LAUNCH = (
    "config machine storage run_folder run.command run.compose run.names data.shards.manifest "
)
FOR_LAUNCH += "models.memory_estimate models.model_sizes observe.lines"
FOR_LAUNCH = tuple(f"train.{package}" for package in FOR_LAUNCH.split())
ONLY_IN = {  # heavy or device libraries, and the files that may import them
    "torch_xla": "parallel/xla",
    "boto3": "storage/s3 storage/s3_session",
    "psutil": "machine/memory machine/processes machine/rank_setup observe/monitor tools/doctor",
    "pynvml": "observe/monitor",
    "matplotlib": "observe/report/figures",
    "jinja2": "observe/report/page",
    "pandas": "observe/report/run",
    "huggingface_hub": "observe/push observe/card storage/hub_access",
    "sklearn": "tasks/classify tasks/multilabel tasks/ner",
    "seqeval": "tasks/ner",
    "hydra": "run/overrides run/names",
    "mlflow": "observe/trackers",
    "wandb": "observe/trackers",
    "transformers": "data/text/tokenizer models/encoder models/network models/heads models/pretrained models/source "
    "models/unpadded",
}
MAX_FILE, MAX_FUNCTION = 3_400, 620  # nodes of the syntax tree, which squeezing does not change
MAX_BOXES, MAX_LEVELS = 19, 13  # of the picture of imports


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path, types=False):
    """Modules imported at run time, wherever the import stands; with `types`, also those for types only."""
    names = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


MODULES = {name_of(path): path for path in FILES}


def level(module):
    """The floor of a module of train/, as a number; None for an entry point, which may use what it likes."""
    parts = module.split(".")[1:]
    if not parts or parts[0] not in LEVELS or (parts[-1] == "__main__" and len(parts) > 1):
        return None
    return LEVELS.index(parts[0]), DATA.index(parts[1]) if parts[0] == "data" and len(
        parts
    ) > 1 else -1


def test_train_has_these_packages_and_modules():
    folders = {
        path.parent.relative_to(ROOT / "train").parts[0]
        for path in FILES
        if path.parts[-2] != "train" and path.is_relative_to(ROOT / "train")
    }
    assert folders == set(PACKAGES)
    modules = {path.stem for path in (ROOT / "train").glob("*.py")}
    assert modules == {"__init__", *FRONT}


def test_imports_go_downwards():
    for path in FILES:
        name = name_of(path)
        here = level(name)
        for imported in imports(path) if name.startswith("train.") else ():
            there = level(imported) if imported in MODULES else None
            assert here is None or there is None or there <= here, f"{name} imports {imported}"
            assert imported.split(".")[0] not in ("launch", "ami"), f"{name} imports {imported}"


def test_no_modules_import_one_another_in_a_circle():
    graph = {
        name: {each for each in imports(path, types=True) if each in MODULES} - {name}
        for name, path in MODULES.items()
    }
    for name in graph:  # a package's own file is named by every import from the package
        graph[name] -= {
            ".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 1)
        }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def box(module):
    """The folder of train/, launch/ or ami/ that a module is in, or the module if it stands in train/ itself."""
    parts = module.split(".")
    if parts[0] == "train" and parts[-1] == "__main__":
        return ".".join(parts[1:])
    return parts[0] if parts[0] != "train" else ".".join(parts[1:2])


def test_the_picture_of_imports_in_contributing_is_true():
    graph = {}
    for name, path in MODULES.items():
        boxes = {box(each) for each in imports(path) if each in MODULES} - {box(name), ""}
        graph.setdefault(box(name), set()).update(boxes)
    del graph[""]  # train/__init__.py
    levels = {}
    for each in graphlib.TopologicalSorter(
        graph
    ).static_order():  # raises CycleError, with the circle
        levels[each] = 1 + max((levels[below] for below in graph[each]), default=0)
    picture = "\n".join(
        f"{level:>2}  {'  '.join(sorted(each for each in levels if levels[each] == level))}"
        for level in sorted(set(levels.values()), reverse=True)
    )
    assert len(levels) <= MAX_BOXES and max(levels.values()) <= MAX_LEVELS
    assert f"```\n{picture}\n```" in (ROOT / "CONTRIBUTING.md").read_text(), picture


TORCH_FREE = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("launch", "ami")]


def test_launch_and_ami_import_what_works_without_torch():
    for path in TORCH_FREE:
        for imported in imports(path):
            is_free = imported.startswith(FOR_LAUNCH) or imported in {
                f"train.{package}" for package in PACKAGES
            }
            assert not imported.startswith("train.") or is_free, f"{path} imports {imported}"


def test_launch_ami_and_what_reads_a_command_need_no_torch():
    modules = [name for name in map(name_of, TORCH_FREE) if not name.endswith("__main__")]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; "
    code += "from train.run import compose as cli; from train.config import TrainConfig; "
    code += "cli.load_config(TrainConfig, 'run_dir=r data.path=d max_steps=1 global_batch_size=8'.split()); "
    code += "print(*sys.modules)"
    words = [sys.executable, "-c", code, "train.entry", *modules]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


def test_a_training_run_imports_no_tool():
    code = "import sys, train.entry, train.loop; print(*(name for name in sys.modules if name.startswith('train.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "train.loop" in done.stdout
    assert not [module for module in done.stdout.split() if module.startswith(tuple(TOOLS))]


NOT_FOR_THE_FIRST_STEP = (
    "boto3 botocore datasets matplotlib pandas pyarrow s3torchconnector sklearn torch_xla".split()
)
NOT_FOR_THE_FIRST_STEP += ["tensorboard", "torch.utils.tensorboard"]


def test_the_first_step_waits_for_no_library_that_it_does_not_need(tmp_path, prepared):
    code = """if True:
        import gc, sys
        usual = gc.get_threshold()
        from train import entry, loop
        def end_step(*_, **__):
            assert gc.get_threshold() == usual and gc.get_freeze_count() > 100_000
            from transformers.utils import is_torch_xla_available
            assert not is_torch_xla_available()  # accelerate asks the same, and imports torch_xla
            print(*sys.modules)
            raise KeyboardInterrupt
        loop.Recorder.end_step = end_step
        entry.main(sys.argv[1:])
    """
    settings = train_overrides(
        tmp_path / "run", prepared, "telemetry.trackers=[tensorboard]", "backend=ddp"
    )
    words = [sys.executable, "-c", code, *settings]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "train.loop" in done.stdout.split(), done.stderr
    assert not set(NOT_FOR_THE_FIRST_STEP) & set(done.stdout.split())


def test_heavy_libraries_stay_in_their_files():
    for library, files in ONLY_IN.items():
        users = {
            path for path in FILES if any(name.split(".")[0] == library for name in imports(path))
        }
        assert users <= {ROOT / f"train/{file}.py" for file in files.split()}, library


def test_device_names_stay_in_the_backends():
    for path in FILES:
        text = path.read_text()
        if not {"parallel", "config", "ami"} & set(path.parts):  # of images, one is named cuda
            for word in ('"cuda"', '"nccl"', '"gloo"', '"xla"'):
                assert word not in text, f"{path} names {word}"


def test_files_and_functions_stay_short_and_modules_say_what_they_are():
    for path in FILES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        module = ast.parse(text)
        assert nodes(module) <= MAX_FILE and ast.get_docstring(module), name
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                assert nodes(node) <= MAX_FUNCTION, f"{name}:{node.name} {nodes(node)}"


def nodes(tree):
    return sum(1 for _ in ast.walk(tree))
