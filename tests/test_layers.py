"""The house rules that a machine can keep: who imports whom, where device libraries are, how long things get."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from running import train_overrides

ROOT = Path(__file__).parent.parent
FILES = sorted(path for package in ("train", "launch", "ami") for path in (ROOT / package).rglob("*.py"))

# Bottom to top: a package imports from those before it, and from itself. Types may come from anywhere (TYPE_CHECKING).
# Those between two commas are side by side.
PACKAGES = """
    config, host, cli, storage, run_folder, ranks,
    data.random_bits, data.files, data.shards, data.text, data.batches, data.records,
    models, optim, backend, parallel, tasks, cli.compose, cli.saved, checkpoints, telemetry, attempt,
    feed, evaluation, loop, report, publish compare,
    doctor precompile prepare convert shards records predict hub, bench, settings, entry, __main__, baretrain
""".split(",")
PACKAGES = [[f"train.{package}" for package in line.split()] for line in PACKAGES]
TOOLS = "settings bench report publish compare doctor precompile prepare convert shards records predict hub"
TOOLS = {f"train.{package}" for package in TOOLS.split()}
# Of train, without torch.
FOR_LAUNCH = (
    "config host cli storage run_folder data.shards.format data.shards.order models.memory_estimate models.model_sizes "
)
FOR_LAUNCH += "telemetry.lines"
FOR_LAUNCH = tuple(f"train.{package}" for package in FOR_LAUNCH.split())
ONLY_IN = {  # heavy or device libraries, and the files that may import them
    "torch_xla": "backend/xla",
    "boto3": "storage/s3",
    "psutil": "host/rank_setup telemetry/monitor doctor/checks",
    "pynvml": "telemetry/monitor doctor/checks",
    "matplotlib": "report/figures",
    "jinja2": "report/page",
    "huggingface_hub": "publish/push publish/card storage/hub_access",
    "sklearn": "tasks/classify/task tasks/ner/task",
    "seqeval": "tasks/ner/task",
    "hydra": "cli/compose cli/names",
    "mlflow": "telemetry/trackers",
    "wandb": "telemetry/trackers",
    "transformers": "data/text/tokenizer models/encoder models/network models/heads models/pretrained models/source",
}
MAX_FILE, MAX_FUNCTION = 350, 60  # lines


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path):
    """Modules imported at run time, wherever the import stands."""
    names = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # imports for types only do not count
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


ROWS = {name: number for number, packages in enumerate(PACKAGES) for name in packages}


def package(module):
    """The package of a module, and its row in the list."""
    name = module
    while name and name not in ROWS:  # train.cli.compose is a package of its own, train.cli another
        name = name.rpartition(".")[0]
    return (name, ROWS[name]) if name else (None, None)


def test_imports_go_downwards():
    assert set(ROWS) == {package(name_of(path))[0] for path in FILES} - {None}
    for path in FILES:
        here, row = package(name_of(path))
        is_train = path.relative_to(ROOT).parts[0] == "train"
        assert here or path.name == "__init__.py" or not is_train, f"{path} is in no package of the list"
        for imported in imports(path) if here else ():
            there, lower = package(imported)
            late_export = (here, there) == ("train.loop", "train.publish")  # what a run does at its end
            assert not there or there == here or lower < row or late_export, f"{name_of(path)} imports {imported}"
            assert imported.split(".")[0] not in ("launch", "ami"), f"{name_of(path)} imports {imported}"


TORCH_FREE = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("launch", "ami")]


def test_launch_and_ami_import_what_works_without_torch():
    for path in TORCH_FREE:
        for imported in imports(path):
            assert not imported.startswith("train.") or imported.startswith(FOR_LAUNCH), f"{path} imports {imported}"


def test_launch_ami_and_what_reads_a_command_need_no_torch():
    modules = [name for name in map(name_of, TORCH_FREE) if not name.endswith("__main__")]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; "
    code += "from train.cli import compose as cli; from train.config import TrainConfig; "
    code += "cli.load_config(TrainConfig, 'run_dir=r data.path=d max_steps=1 global_batch_size=8'.split()); "
    code += "print(*sys.modules)"
    words = [sys.executable, "-c", code, "train.entry", *modules]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


def test_a_training_run_imports_no_tool():
    code = "import sys, train.entry, train.loop; print(*(name for name in sys.modules if name.startswith('train.')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "train.loop" in done.stdout
    assert not {package(module)[0] for module in done.stdout.split()} & TOOLS


NOT_FOR_THE_FIRST_STEP = "boto3 botocore datasets matplotlib pandas pyarrow s3torchconnector sklearn torch_xla".split()
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
        entry.run_command_line(sys.argv[1:])
    """
    settings = train_overrides(tmp_path / "run", prepared, "tensorboard=true", "backend=ddp")
    words = [sys.executable, "-c", code, *settings]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "train.loop" in done.stdout.split(), done.stderr
    assert not set(NOT_FOR_THE_FIRST_STEP) & set(done.stdout.split())


def test_heavy_libraries_stay_in_their_files():
    for library, files in ONLY_IN.items():
        users = {path for path in FILES if any(name.split(".")[0] == library for name in imports(path))}
        assert users <= {ROOT / f"train/{file}.py" for file in files.split()}, library


def test_device_names_stay_in_the_backends():
    for path in FILES:
        text = path.read_text()
        if not {"backend", "config", "ami"} & set(path.parts):  # of images, one is named cuda
            for word in ('"cuda"', '"nccl"', '"gloo"', '"xla"'):
                assert word not in text, f"{path} names {word}"


def test_files_and_functions_stay_short_and_modules_say_what_they_are():
    for path in FILES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        module = ast.parse(text)
        assert len(text.splitlines()) <= MAX_FILE and ast.get_docstring(module), name
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno
                assert length <= MAX_FUNCTION, f"{name}:{node.name} {length}"
