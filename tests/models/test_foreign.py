"""Models, runs and settings of others: their code is not executed, what they name is not looked up, asked or copied."""

import ast
import base64
import io
import json
import os
import shutil
import stat
import struct
import subprocess
import sys

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pytest
import torch
import yaml
from datasets import packaged_modules
from pyarrow import parquet
from rejections import rejects
from running import ROOT, train_config
from safetensors.torch import load_file
from services.fake_hub import FakeHub
from test_source import write_tokenizer
from transformers import BertConfig, BertForSequenceClassification

from train.config import (
    ColumnsConfig,
    HFCorpusConfig,
    HFDataset,
    InputError,
    ModelConfig,
    RecordsConfig,
    S3Config,
    TrainConfig,
    flat,
    to_dict,
)
from train.config.tasks import ClassifyConfig
from train.data.files.data_sets import BUILDERS
from train.data.records.data_sets import HubSource
from train.data.records.formats import dataset_table, parquet_table
from train.data.records.saved import load_saved
from train.data.text.corpus import open_corpus
from train.data.text.tokenizer import load_tokenizer
from train.models.encoder import model_config, without_weights
from train.models.network import Network
from train.models.source import task_tokenizer
from train.run import compose as cli
from train.run.saved import read_config
from train.storage.folders import LocalFolder
from train.storage.s3 import S3Folder
from train.tasks.state import TaskState, files_beside
from train.tools import checkpoints, predict

SMALL = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
ASK = ["--text", "the cat", "backend.device=cpu"]


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder of transformers: a small classifier."""
    folder = tmp_path_factory.mktemp("model") / "small"
    BertForSequenceClassification(BertConfig(**SMALL, num_labels=3)).save_pretrained(folder)
    return write_tokenizer(folder)


@pytest.fixture
def model(small, tmp_path):
    return shutil.copytree(small, tmp_path / "model")


def rejection_of(model, capsys):
    """The line with which the model is rejected."""
    assert predict.main([str(model), *ASK]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    return errors


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def plant_code(model, mark, *, model_type):
    """Code that leaves a mark when it is imported, named by the configuration and by the tokenizer."""
    (model / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\nclass C: ...\nclass M: ...\nclass T: ...\n"
    )
    classes = dict.fromkeys(
        ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"), "evil.M"
    )
    auto_map = {"AutoConfig": "evil.C", **classes}
    edit(model / "config.json", auto_map=auto_map, model_type=model_type)
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "evil.T"]}, "tokenizer_class": "T"}
    edit(model / "tokenizer_config.json", **tokenizer)


@pytest.fixture
def says_yes(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 100))


@pytest.mark.parametrize("model_type", ["bert", "evil"])
def test_code_that_comes_with_a_model_is_not_executed_even_if_standard_input_says_yes(
    model, tmp_path, says_yes, capsys, model_type
):
    mark = tmp_path / "executed"
    plant_code(model, mark, model_type=model_type)
    cfg = ModelConfig(pretrained=str(model), tokenizer=str(model))
    for load in (
        lambda: load_tokenizer(str(model)),
        lambda: task_tokenizer(cfg),
        lambda: without_weights("SequenceClassification", model),
        lambda: model_config(cfg, vocab_size=10, pad_id=0),
    ):
        try:
            load()
        except InputError as error:
            assert "\n" not in str(error)
    code = predict.main([str(model), *ASK])
    errors = capsys.readouterr().err
    assert not mark.exists()
    # a run may have set up logs
    (line,) = [line for line in errors.splitlines() if "auto_map is ignored" not in line]
    assert code == 2 and line.startswith("error: ")
    assert (
        "which is never executed here" if model_type == "bert" else "'evil' is not a supported"
    ) in errors


def charsmap(blob):
    """The table of a sentencepiece normalizer."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


# two of a trie, which lead far behind its end
UNITS = struct.pack("<3I", 8, 0x3FF << 10, 0x3FF << 10)
TEMPLATE = {  # of a single text and of a pair
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2**32 - 1], "tokens": ["[CLS]"]}},
}
OF_CONFIG = {  # by what the error says: a changed value of config.json
    "auto_map asks": {"a": [{"b": {"auto_map": {"AutoConfig": "evil.C"}}}]},
    "trust_remote_code asks": {"text_config": {"trust_remote_code": True}},
    "attn_implementation asks": {"attn_implementation": "someone/kernels"},
    "quantization_config asks": {"quantization_config": {"quant_method": "unknown"}},
    "configuration_files asks": {"configuration_files": ["config.4.0.0.json"]},
    "transformers_weights asks": {"transformers_weights": "../other.bin"},
    "model_type 'lightglue' is not": {"keypoint_detector_config": {"model_type": "lightglue"}},
    "is_decoder is True": {"is_decoder": True},
    "num_hidden_layers is -1;": {"num_hidden_layers": -1},
    "num_labels is 1000000000;": {"num_labels": 10**9},
    "different name for each label, not 'a', 'a'": {"id2label": {"0": "a", "1": "a"}},
    "position_embedding_type is 'r": {"position_embedding_type": "relative_key_query"},
    "pruned_heads is {'0': [1]}": {"pruned_heads": {"0": [1]}},
    "hidden_size is '8';": {"hidden_size": "8"},
    "pad_token_id is 99999;": {"pad_token_id": 99999},
    "hidden_dropout_prob is 2;": {"hidden_dropout_prob": 2},
    "transformers does not know hidden_act=swoosh": {"hidden_act": "swoosh"},
    "'layer_norm_eps' expected float": {"layer_norm_eps": "small"},
    "architectures[0] is 5": {"architectures": [5]},
    "weights alone take": {"max_position_embeddings": 10**9, "hidden_size": 10**6},
}
FIXED = {"type": "FixedLength", "length": 0}
OF_FILES = {  # of another file
    "contains an adapter": ("adapter_config", {"base_model_name_or_path": "someone/else"}),
    "is not a fast one (BertModelFast": ("tokenizer_config", {"tokenizer_class": "BertModelFast"}),
    "auto_map asks transformers": ("tokenizer_config", {"auto_map": {"AutoTokenizer": "evil.T"}}),
    "vocab makes": ("tokenizer_config", {"vocab": "/etc/passwd"}),
    "init_inputs makes": ("tokenizer_config", {"init_inputs": ["/etc/passwd"]}),
    "'vocab_file' is not a special token": ("special_tokens_map", {"vocab_file": "/etc/passwd"}),
    "index out of bounds": ("tokenizer", {"normalizer": charsmap(UNITS + b"x\0")}),
    "Cannot parse precompiled_charsmap": ("tokenizer", {"normalizer": charsmap(b"\1")}),
    "adds a token with id 4294967295": ("tokenizer", {"post_processor": TEMPLATE}),
    "chunk size must be non-zero": ("tokenizer", {"pre_tokenizer": FIXED}),
}
REJECTED = {says: ("config", changes) for says, changes in OF_CONFIG.items()} | OF_FILES


def test_the_code_of_an_architecture_that_transformers_has_is_ignored(
    model, tmp_path, says_yes, log
):
    """As in the published files of EuroBERT, whose export then names no code."""
    mark = tmp_path / "executed"
    before = (model / "tokenizer_config.json").read_bytes()
    plant_code(model, mark, model_type="bert")
    (model / "tokenizer_config.json").write_bytes(before)
    assert predict.main([str(model), *ASK]) == 0
    assert (
        f"{model}/config.json: auto_map is ignored: transformers has its own code for bert"
        in log.messages
    )
    cfg = ModelConfig(pretrained=str(model), tokenizer=str(model))
    assert not hasattr(model_config(cfg, vocab_size=10, pad_id=0), "auto_map")
    assert not mark.exists()


@pytest.mark.parametrize("says", REJECTED)
def test_a_model_of_someone_is_rejected_in_one_line_before_transformers_sees_it(
    model, says, capfd
):
    name, changes = REJECTED[says]
    path = model / f"{name}.json"
    if not path.exists():
        path.write_text("{}")
    edit(path, **changes)
    capfd.readouterr()
    assert predict.main([str(model), *ASK]) == 2
    *others, line = capfd.readouterr().err.splitlines()
    # Rust says where it panicked.
    assert says in line and (not others or "panicked" in others[1])


def pattern(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Removed", "invert": False}


def test_a_regular_expression_of_a_tokenizer_may_not_take_for_ever(model, capfd):
    edit(model / "tokenizer.json", pre_tokenizer=pattern("(q+)+$"))
    assert predict.main([str(model), "--text", "q" * 60 + "!", *ASK[2:]]) == 1
    (*_, line) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: the tokenizer cannot read a text: Onig: ")


def test_a_vocabulary_names_no_numbers_far_behind_its_end(model):
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["sat"] = 2**32 - 1
    edit(model / "tokenizer.json", **content)
    rejects(
        "piece 'sat' has the id 4294967295, though there are only .* pieces",
        load_tokenizer,
        str(model),
    )


def test_what_published_models_hold_beside_their_sizes_is_accepted(model, tmp_path):
    edit(
        model / "config.json",
        _attn_implementation_autoset=True,
        quantization_config=None,
        return_dict=False,
    )
    templates = [{"name": name, "template": "x"} for name in ("default", "../../../evil")]
    paths = {
        "special_tokens_map_file": "/root/.cache/x",
        "tokenizer_file": "/root/y",
        "init_inputs": [],
    }
    edit(model / "tokenizer_config.json", chat_template=templates, **paths)
    load_tokenizer(str(model)).save_pretrained(tmp_path / "a/b/c")
    assert predict.main([str(model), *ASK]) == 0
    assert not list(tmp_path.rglob("*evil*")) and not list(tmp_path.rglob("*.jinja"))


def test_layers_that_the_configuration_leaves_out_are_named(tmp_path, capsys):
    BertForSequenceClassification(BertConfig(**{**SMALL, "num_hidden_layers": 2})).save_pretrained(
        tmp_path
    )
    edit(write_tokenizer(tmp_path) / "config.json", num_hidden_layers=1)
    assert predict.main([str(tmp_path), *ASK]) == 2
    assert (
        "has weights in its encoder that transformers does not read: bert.encoder.layer.1."
        in capsys.readouterr().err
    )


def test_pickled_weights_are_not_read_and_the_command_that_converts_them_is_named(model, capsys):
    wanted = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save({**wanted, "extra": torch.ones(2, 3).T}, model / "pytorch_model.bin")
    errors = rejection_of(model, capsys)
    assert "pytorch_model.bin has pickled weights, which baretrain does not read" in errors
    command = errors.partition("2.10 or newer: ")[2].replace("python -c", f"{sys.executable} -c")
    subprocess.run(command, shell=True, check=True)
    made = load_file(model / "model.safetensors")
    assert all(made[name].equal(weight) for name, weight in wanted.items()) and made[
        "extra"
    ].shape == (3, 2)


@pytest.mark.parametrize(
    "name", ["../small/model.safetensors", "/etc/passwd", 5, "w.bin", "model.safetensors.bin"]
)
def test_an_index_of_weights_names_files_of_its_folder_only(model, name, capsys):
    (model / "model.safetensors").unlink()
    (model / "w.bin").write_bytes(b"")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"bert.x": name}})
    )
    assert "weight_map" in rejection_of(model, capsys)


def test_an_export_copies_no_link_of_a_tokenizer(tmp_path):
    (tmp_path / "data/tokenizer").mkdir(parents=True)
    (tmp_path / "secret").touch()
    (tmp_path / "data/tokenizer/notes.txt").symlink_to(tmp_path / "secret")
    state = TaskState("mlm", {}, seq_len=8, seed=0)
    rejects("leads out of", files_beside, tmp_path / "data/tokenizer", inputs=[], state=state)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "tokenizer.json", "notes.txt"]
)
@pytest.mark.parametrize("target", [None, "../secret", "/dev/zero"])
def test_the_files_of_a_model_are_regular_files_of_its_folder(
    model, tmp_path, capsys, name, target
):
    (tmp_path / "secret").write_text("{}")
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name) if target is None else (model / name).symlink_to(target)
    errors = rejection_of(model, capsys)
    assert "leads out of" in errors or "not a regular file" in errors


CODE = [
    path
    for package in ("train", "launch", "ami", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
]
SAFE = {  # by the last part of a call's name: the keyword that has to be there
    "from_pretrained": ("trust_remote_code", False),
    "from_config": ("trust_remote_code", False),
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
}
NEVER = "pickle.load pickle.loads yaml.load yaml.unsafe_load yaml.full_load OmegaConf.load eval exec".split()

LOADERS = {  # files that may
    "train/parallel/ranks.py",  # messages of the run's own ranks, which torch's collectives of objects load alike
    "train/storage/imported.py",  # the file that --import names on the command line
}


def test_every_call_that_loads_says_that_it_executes_nothing():
    calls = [(path, node) for path in CODE for node in ast.walk(ast.parse(path.read_text()))]
    for path, node in calls:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        assert name not in NEVER or path.relative_to(ROOT).as_posix() in LOADERS, (
            f"{path}:{node.lineno} {name}"
        )
        wanted = SAFE.get(name) or SAFE.get(name.rpartition(".")[2])
        if wanted is not None:
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert given.get(wanted[0]) == str(wanted[1]), (
                f"{path}:{node.lineno} lacks {wanted[0]}={wanted[1]}"
            )
            is_read_whole = (
                name == "torch.load"
                and "benchmarks" not in path.parts
                and given.get("mmap") != "True"
            )
            assert not is_read_whole, (
                f"{path}:{node.lineno} lacks mmap=True, without which a file can claim any memory"
            )


# ---- config.yaml of a run ------------------------------------------------------------------------------------------


def foreign_run(folder, change=lambda config: None):
    """As much of a run folder as says what the run was."""
    folder.mkdir()
    config = to_dict(train_config(folder, folder / "data"))
    change(config)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for name in ("environment.json", "metrics.jsonl"):
        (folder / name).write_text("{}\n")
    return folder


LOOKED_UP = {
    "a server": lambda config: config["s3"].update(endpoint="http://host/${oc.env:HF_TOKEN,none}"),
    "a path": lambda config: config["data"].update(path="${oc.env:HF_TOKEN}"),
    "a key": lambda config: config.update({"${oc.env:HF_TOKEN}": 1}),
    "in a list": lambda config: config["task"].update(mask_rate=["${oc.env:HF_TOKEN}"]),
    "escaped": lambda config: config.update(run_dir="\\${oc.env:HF_TOKEN}"),
}


@pytest.mark.parametrize("case", LOOKED_UP)
def test_nothing_in_the_configuration_of_a_run_is_looked_up(tmp_path, monkeypatch, capsys, case):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run = foreign_run(tmp_path / "run", LOOKED_UP[case])
    assert checkpoints.main([str(run), "export", str(tmp_path / "out")]) == 2
    assert predict.main([str(run), "--text", "x"]) == 2
    errors = capsys.readouterr().err
    assert (
        errors.count("references in a run's file are not resolved") == 2
        and "hf_secret" not in errors
    )


def test_the_configuration_of_a_run_names_no_file_no_server_and_no_place_to_write_to(tmp_path):
    def point_elsewhere(config):
        config["s3"].update(endpoint="http://evil:1", region="x")
        config["data"].update(cache_dir="/home", path="/home/me/.aws/credentials", num_workers=128)
        config["model"].update(pretrained="/home/me/model", tokenizer="evil/tokenizer")
        config["backend"].update(compile="layers")
        config["hub"].update(push_to="evil/model")
        config["telemetry"].update(trackers=["mlflow", "wandb"])
        config["lease"].update(ttl_s=9)
        config.update(run_dir="/home/me", profile=True, max_steps=10**9)

    ours = flat(read_config(LocalFolder(foreign_run(tmp_path / "ours"))))
    theirs = flat(read_config(LocalFolder(foreign_run(tmp_path / "theirs", point_elsewhere))))
    changed = {key: value for key, value in theirs.items() if value != ours[key]}
    assert changed == {"run_dir": str(tmp_path / "theirs"), "backend.compile": "layers"}
    assert (ours["data.path"], ours["data.cache_dir"], ours["model.tokenizer"]) == ("", None, None)


def test_of_labelled_rows_only_the_form_is_taken_over(tmp_path):
    settings = RecordsConfig(
        path="/etc", train="a.csv", validation="/etc/passwd", more_validation={"x": "y"}, name="n"
    )
    config = to_dict(
        TrainConfig(
            run_dir="x", task=ClassifyConfig(), data=settings, max_steps=1, micro_batch_size=1
        )
    )
    config["data"].update(
        delimiter=";", labels=["a", "b"], columns={**config["data"]["columns"], "text": "words"}
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    data = read_config(LocalFolder(tmp_path)).data
    columns = ColumnsConfig(text="words")
    assert data == RecordsConfig(path="", delimiter=";", labels=["a", "b"], columns=columns)


OBJECT = "!!python/object/apply:os.system [x]"
NO_CONFIGURATION = [
    "",
    "[]",
    "a: &a [*a]",
    OBJECT,
    "s3: 5",
    "\0",
    "task: 1",
    "a: 2001-99-99",
    "a: " + "[" * 5000,
    "#" * (2**22 + 1),
]


@pytest.mark.parametrize("content", NO_CONFIGURATION, ids=lambda content: ascii(content)[:30])
def test_a_configuration_that_is_none_is_one_line(tmp_path, content, capsys):
    run = foreign_run(tmp_path / "run")
    (run / "config.yaml").write_text(content)
    assert checkpoints.main([str(run), "export", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("override", ["s3.region=${oc.env:HOME}", "run_dir='${oc.env:HOME}'"])
def test_settings_are_not_looked_up_either_as_config_yaml_would_keep_them(override):
    said = rejects("let the shell do it", cli.load_config, TrainConfig, [override])
    assert os.environ["HOME"] not in said


# ---- credentials ---------------------------------------------------------------------------------------------------


WITH_CREDENTIALS = [
    "http://user:hunter2@host",
    "user:hunter2@host",
    "http://host/?token=hunter2",
    "http://user:hunter2@[host",
]


@pytest.mark.parametrize("endpoint", WITH_CREDENTIALS)
def test_credentials_in_an_endpoint_are_rejected_and_not_repeated(endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    hidden = "^(?!.*hunter2)"
    rejects(f"{hidden}.*contains more than an address", S3Config, endpoint=endpoint)
    # by botocore, if it cannot even be read as an address
    rejects(hidden, S3Folder, "s3://bucket/prefix", S3Config(region="us-east-1"))


def test_credentials_in_a_location_are_rejected_and_not_repeated():
    rejects(
        "^(?!.*hunter2).*contains credentials",
        S3Folder,
        "s3://key:hunter2@bucket/prefix",
        S3Config(),
    )


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides_for_all_files_of_an_export(tmp_path, umask):
    before = os.umask(umask)
    try:
        Network(BertForSequenceClassification(BertConfig(**SMALL))).export(tmp_path / "export")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "export").iterdir()
    }
    assert set(modes) == {"config.json", "model.safetensors"} and set(modes.values()) == {
        0o666 & ~umask
    }


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """What save_to_disk writes, beside another data set that is not for reading."""
    for name in ("other", "ours"):
        table = datasets.Dataset.from_dict({"text": [name] * 3})
        datasets.DatasetDict(train=table).save_to_disk(str(tmp_path / name))
    return tmp_path / "ours"


def test_the_index_of_a_saved_data_set_names_files_of_its_folder_only(saved):
    assert load_saved(saved, "it")["train"]["text"][:] == ["ours"] * 3
    state, index = saved / "train" / "state.json", saved / "dataset_dict.json"
    elsewhere = "../../other/train/data-00000-of-00001.arrow"
    for path, key, value in (
        (index, "splits", ["../other/train"]),
        (state, "_data_files", [{"filename": elsewhere}]),
        (state, "_data_files", [{"filename": str((state.parent / elsewhere).resolve())}]),
        (state, "_data_files", 5),
    ):
        before = path.read_text()
        edit(path, **{key: value})
        rejects(f"it cannot be read as a saved data set: .*{path.name}: ", load_saved, saved, "it")
        path.write_text(before)


def test_of_a_saved_data_set_only_what_was_examined_is_read(saved, tmp_path):
    # the library prefers this table of the folder
    shutil.copy(tmp_path / "other/train/dataset_info.json", saved)
    elsewhere = {"_data_files": [{"filename": "../other/train/data-00000-of-00001.arrow"}]}
    state = json.loads((tmp_path / "other/train/state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, **elsewhere}))
    assert load_saved(saved)["train"]["text"][:] == ["ours"] * 3
    table = saved / "train/data-00000-of-00001.arrow"
    table.unlink()
    table.symlink_to("../../other/train/data-00000-of-00001.arrow")
    rejects("leads out of", load_saved, saved)
    shutil.rmtree(saved / "train")
    (saved / "train").symlink_to("../other/train")
    rejects("leads out of", load_saved, saved)
    (saved / "dataset_dict.json").unlink()
    rejects("state.json: _data_files", load_saved, saved)
    os.mkfifo(saved / "dataset_dict.json")
    rejects("it is a pipe", load_saved, saved)


def test_a_saved_column_whose_rows_name_files_is_left_out(tmp_path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "shown": datasets.List(datasets.Image())}
    )
    rows = {"text": ["a"], "shown": [[{"path": "http://127.0.0.1:1/a.png", "bytes": b"x"}]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    assert load_saved(tmp_path / "saved")[:] == {"text": ["a"]}


@pytest.fixture
def described(tmp_path, monkeypatch):
    """A data set of the layout of the Hub, beside a private file, and a function that writes its description."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "secret.csv").write_text("text,label\nprivate,1\n")
    (folder / "a.csv").write_text("text,label\nours,1\n")

    def describe(name="README.md", **config):
        head = yaml.safe_dump({"configs": [{"config_name": "default", **config}]})
        (folder / name).write_text(f"---\n{head}---\n" if name == "README.md" else head)
        return folder

    return describe


def rows_of(folder):
    source = HubSource(RecordsConfig(path=str(folder), format="hub"), S3Config())
    (table,) = source.tables(["text"], folder.parent / "scratch")["train"]
    return [row["text"] for _, row in table.rows()]


def documents_of(folder, data_files=None):
    dataset = HFDataset(path=str(folder), data_files=data_files)
    corpus = open_corpus(HFCorpusConfig(kind="hf", name="test", datasets=[dataset]))
    return [document.text for document in corpus.documents()]


ELSEWHERE = [
    {"data_files": "../secret.csv"},
    {"data_files": ["a.csv", "SECRET"]},
    {"data_files": "sub/*.csv"},
    {"data_files": "link.csv"},
    {"data_files": [{"split": "train", "path": "*/../../secret.csv"}]},
    {"data_files": "*.csv", "data_dir": ".."},
    {"data_files": "hf://datasets/lab/private@main/x.csv"},
    {"data_files": "SERVER/a.csv"},
    {"data_files": "zip://a.csv::SERVER/a.zip"},
    {"data_files": "../secret.csv", "name": ".huggingface.yaml"},
]


@pytest.mark.parametrize("config", ELSEWHERE, ids=str)
def test_a_description_of_a_data_set_names_files_of_its_folder_only(described, config, tmp_path):
    (tmp_path / "set/sub").symlink_to(tmp_path)
    (tmp_path / "set/link.csv").symlink_to("../secret.csv")
    says = r"its description \(README.md\) names '.*', which is not a file of this data set"
    with FakeHub() as server:
        text = json.dumps(config).replace("SECRET", f"{tmp_path}/secret.csv")
        folder = described(**json.loads(text.replace("SERVER", server.endpoint)))
        for read in (rows_of, documents_of):
            rejects(f"{says}|sub is a link that leads out of", read, folder)
        assert not server.requests


def test_a_data_set_is_read_from_its_folder_and_from_the_cache_of_the_hub(described, tmp_path):
    folder = described(data_files=[{"split": "train", "path": "./a.*"}])
    assert rows_of(folder) == documents_of(folder) == ["ours"]
    snapshot = tmp_path / "hub/datasets--lab--texts/snapshots/c0ffee"
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    shutil.copy(tmp_path / "set/a.csv", snapshot.parent.parent / "blobs/123")
    (snapshot / "a.csv").symlink_to("../../blobs/123")
    assert rows_of(snapshot) == documents_of(snapshot) == ["ours"]
    # which the user typed
    assert documents_of(folder, str(tmp_path / "secret.csv")) == ["private"]


def of_each_kind():
    """A file name of each kind of data set that the library reads and we do not."""
    kinds = {module: name for name, (module, _) in packaged_modules._EXTENSION_TO_MODULE.items()}
    return {module: name for module, name in kinds.items() if module not in BUILDERS}


def test_data_sets_of_other_kinds_are_rejected_before_they_are_read(described, tmp_path):
    kinds = of_each_kind()
    assert kinds.keys() >= {"webdataset", "imagefolder", "audiofolder", "xml", "hdf5", "lance"}
    for kind, suffix in kinds.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / f"train{suffix}").write_bytes(b"x")
        for read in (rows_of, documents_of):
            rejects(f"is of the kind {kind}, which is not read here", read, folder)


TYPES = {  # of the column text, in a form that a description can have
    "image": {"dtype": "image"},
    "a list": {"list": {"dtype": "audio"}},
    "an object": {"struct": [{"name": "a", "dtype": "image"}]},
}
INFO = {"text": {"_type": "Image"}, "label": {"dtype": "string", "_type": "Value"}}


@pytest.mark.parametrize("kind", [*TYPES, "dataset_infos.json", "a schema"])
def test_no_type_of_a_column_opens_what_the_rows_name(described, tmp_path, kind):
    with FakeHub() as server:
        folder, info = described(data_files="a.csv"), {"features": INFO}
        rows = f"{server.endpoint}/a.png,x\n{tmp_path}/secret.csv,y\n"
        (folder / "a.csv").write_text(f"text,label\n{rows}")
        if kind == "a schema":
            place = {"path": f"{server.endpoint}/a.png", "bytes": None}
            stored = pa.array([place], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
            table = pa.table({"text": stored, "label": ["x"]})
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": info})})
            parquet.write_table(table, folder / "a.parquet")
            described(data_files="a.parquet")
        elif kind == "dataset_infos.json":
            (folder / "README.md").unlink()
            (folder / kind).write_text(json.dumps({"default": info}))
        else:
            features = [{"name": "text", **TYPES[kind]}, {"name": "label", "dtype": "string"}]
            head = {"configs": [{"config_name": "default", "data_files": "a.csv"}]}
            head["dataset_info"] = {"features": features}
            (folder / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n")
        for read in (rows_of, documents_of):
            rejects("column 'text' has the type (Image|Audio); only text", read, folder)
        assert not server.requests


def test_a_description_that_is_no_plain_yaml_or_a_link_is_rejected_in_one_line(
    described, tmp_path
):
    folder = described(data_files="a.csv")
    (folder / "a.csv").write_text("text,label\na,x\n")
    (folder / "README.md").write_text('---\n!!python/object/apply:os.system ["true"]\n---\n')
    for read in (rows_of, documents_of):
        rejects("could not determine a constructor", read, folder)
    (tmp_path / "private.yaml").write_text("key: secret")
    (folder / ".huggingface.yaml").symlink_to(tmp_path / "private.yaml")
    for read in (rows_of, documents_of):
        rejects("huggingface.yaml is a link that leads out of", read, folder)


def test_a_table_of_arrow_whose_offsets_lead_out_of_it_is_rejected(tmp_path):
    rows = [f"{number:4}" for number in range(99)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(tmp_path / "saved"))
    (path,) = (tmp_path / "saved").glob("*.arrow")
    good, end = path.read_bytes(), struct.pack("<2i", 4 * 98, 4 * 99)
    assert good.count(end) == 1
    # without a check, reading ends the process
    path.write_bytes(good.replace(end, struct.pack("<2i", 4 * 98, 2**30)))
    table = dataset_table(load_saved(tmp_path / "saved"), "it", ["text"])
    rejects("it cannot be read completely: ", list, table.rows())


NO_FEATURES = ['{"info": {"features": "x"}}', '{"info": {"features": {"a": {"_type": "Value"}}}}']


@pytest.mark.parametrize("described_as", NO_FEATURES)
def test_a_schema_that_describes_its_columns_wrongly_is_one_line(tmp_path, described_as):
    table = pa.table({"a": ["x"]}).replace_schema_metadata({"huggingface": described_as})
    parquet.write_table(table, tmp_path / "a.parquet")
    rejects("cannot be read as Parquet", parquet_table, tmp_path / "a.parquet", "a.parquet", ["a"])


def test_objects_whose_names_lead_out_of_a_folder_are_left_out(bucket, caplog):
    names = "a.txt sub/b.txt ../../c.txt sub//d.txt /etc/e.txt .hidden"
    for name in names.split():
        bucket.put(f"run/{name}", b"x")
    assert len(bucket.keys("run/")) >= 5
    folder = S3Folder(bucket.location("run"), bucket.config())
    assert folder.names() == ["a.txt", "sub/b.txt"] == folder.names()
