"""torch.compile: the same numbers as without, no graph more than the shapes need, and none compiled in silence.

TorchInductor takes many seconds for a graph on a CPU, so there are few runs here, each of which shows several things.
"""

import json
import os
import shutil
from dataclasses import asdict
from functools import partial

import pytest
import torch
from finetuning import tuned
from forks import run_forked
from run_results import assert_same_run, losses
from running import lines, run, train_config, train_overrides

from train import loop
from train.attempt.preempt import StopRequest
from train.backend.kernel_cache import KernelCache
from train.cli.command import DONE, FAILED, REJECTED
from train.config import InputError, ModelConfig
from train.models.encoder import build_masked_lm

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: apt-get install g++")
RECOMPUTED = ["backend.activation_checkpointing=true", "micro_batch_size=2"]
WIDE = "model.intermediate_size=8192"  # a layer of 2 MB: above DDP's first bucket, at which torch would cut graphs
SHALLOW = "model.num_layers=1"  # compiled as a whole, a model takes seconds for each layer


def summary(run_dir):
    return lines(run_dir, "summary")[-1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, prepared):
    run_dir = tmp_path_factory.mktemp("runs") / "plain"
    loop.run(train_config(run_dir, prepared, "backend=ddp", WIDE), StopRequest())
    return run_dir


@compiles
def test_compiled_layers_train_as_plain_ones(plain, prepared, tmp_path):
    """Two ranks, accumulation, activation checkpointing; ALBERT's shared layer is compiled once for each mode."""
    settings = train_overrides(tmp_path / "run", prepared, "backend=ddp", "backend.compile=layers", *RECOMPUTED, WIDE)
    result = run(settings, ranks=2)
    assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "run", plain)
    assert summary(tmp_path / "run")["graphs"] == 2 and summary(tmp_path / "run")["compile_s"] > 0
    assert summary(plain).get("graphs", 0) == 0
    assert not lines(tmp_path / "run", "fault") and "graph" not in result.stderr


@pytest.mark.parametrize(
    ("architecture", "freezing", "graphs"),
    [
        ("bert", {}, 2),
        ("bert", {"freeze_embeddings": True}, 3),  # only the first layer's input needs no gradient
        ("bert", {"freeze_layers": 1}, 5),  # training: frozen, first trainable, other; evaluation: frozen, trainable
        ("bert", {"freeze_layers": 2}, 4),
        ("bert", {"freeze_layers": 3}, 2),
        ("albert", {"freeze_embeddings": True}, 2),
    ],
)
def test_as_many_graphs_are_expected_as_layers_need(architecture, freezing, graphs):
    """Counted as torch.compile traces them, without building kernels."""
    cfg = ModelConfig(architecture=architecture, hidden_size=8, num_layers=3, num_heads=2, max_positions=8, **freezing)
    model = build_masked_lm(cfg, vocab_size=9, pad_id=0, seq_len=8)
    ids = torch.ones(2, 8, dtype=torch.long)
    traced = []

    def build(graph, _inputs):
        traced.append(graph)
        return graph.forward

    torch.compiler.reset()
    expected = model.compile_layers(partial(torch.compile, backend=build, fullgraph=True, dynamic=False))
    for _ in range(2):
        model.train()(ids, ids, ids)
        with torch.no_grad():
            model.eval()(ids, ids, ids)
    assert len(traced) == expected == graphs


@compiles
def test_a_compiled_model_resumes_bit_for_bit_with_dropout(prepared, tmp_path):
    """The masks of compiled dropout follow the run's random state."""
    options = ["backend=ddp", "backend.compile=model", "model.hidden_dropout=0.2", "eval_every=null", "max_steps=4"]
    options += [SHALLOW]
    loop.run(train_config(tmp_path / "whole", prepared, *options), StopRequest())
    asked = StopRequest()
    asked.ask("SIGTERM")  # as if a signal had come during the first step
    assert loop.run(train_config(tmp_path / "cut", prepared, *options), asked) == ("SIGTERM", 1)
    assert loop.run(train_config(tmp_path / "cut", prepared, *options), StopRequest()) == ("done", 4)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@compiles
def test_a_classifier_of_several_lengths_has_a_graph_for_each_and_one_too_many_is_named(tokenizer_folder, tmp_path):
    for part, word in (("train", "ba"), ("dev", "na")):
        rows = [(f"{word} " * size, label) for size in (2, 20) for label in ("good", "bad")] * 20
        (tmp_path / f"{part}.csv").write_text(
            "".join(f"{text},{label}\n" for text, label in [("text", "label"), *rows])
        )
    settings = ["task=classify", "data=records", f"data.path={tmp_path}", "data.train=train.csv", "backend=ddp"]
    settings += ["data.validation=dev.csv", SHALLOW]
    settings += ["data.lengths=[16]", "seq_len=32", "eval_every=null", "max_steps=8"]
    tuned(tmp_path / "plain", tokenizer_folder, *settings)
    tuned(tmp_path / "run", tokenizer_folder, *settings, "backend.compile=model", "backend.max_graphs=3")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert summary(tmp_path / "run")["graphs"] == 4
    (warning,) = [
        line for line in (tmp_path / "run" / "log" / "rank_0000.txt").read_text().splitlines() if "graph" in line
    ]
    assert "graph 4 was compiled, 3 are expected" in warning


def test_a_machine_without_a_compiler_is_named(prepared, tmp_path):
    settings = train_overrides(tmp_path / "run", prepared, "backend=ddp", "backend.compile=layers")
    result = run(settings, env={**os.environ, "CXX": "no-such-compiler"})
    assert result.returncode == REJECTED and "there is no no-such-compiler here: apt-get install g++" in result.stderr


@compiles
def test_precompile_fills_the_cache_of_a_run_and_writes_nothing_else(prepared, tmp_path):
    settings = train_overrides(tmp_path / "run", prepared, "backend=ddp", "backend.compile=layers")
    cache = f"backend.compile_cache={tmp_path / 'cache'}"
    words = [*settings, "--nproc-per-node=1"]
    for more, code in (([], REJECTED), ([cache], DONE)):
        done = run([*words, *more], module="train.precompile")
        assert done.returncode == code, done.stderr
        assert code == DONE or done.stderr.startswith("error: give backend.compile_cache, the folder or s3://")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".bin"]
    assert not (tmp_path / "run").exists()
    done = run([*words, "backend.compile_cache=/proc/no"], module="train.precompile")
    assert done.returncode == FAILED and "error: cannot write /proc/no/torch_compile_" in done.stderr
    assert "the graphs of this run are in" not in done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["backend=xla", "backend.compile=layers"], "backend.compile=layers is for backend=ddp; backend=xla compiles"),
        (["backend.cuda_graphs=true"], "backend.cuda_graphs=true is for compiled kernels; set backend.compile=layers"),
        (["backend=ddp", "backend.compile=layers", "backend.cuda_graphs=true"], "needs a CUDA"),
        (["backend.compile=all"], "backend.compile=all is not known; choose one of: none, layers, model"),
    ],
)
def test_settings_that_cannot_work_are_one_line(prepared, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        loop.run(train_config(tmp_path / "run", prepared, *settings), StopRequest())


@compiles
def test_graphs_are_kept_for_other_machines_and_a_damaged_file_is_no_obstacle(bucket, tmp_path):
    """What one process compiled, training and evaluation, another one that has no cache of its own loads from S3, also
    where a process of other shapes came between.
    """
    code = """if True:
        import json, sys, torch
        from torch._dynamo.utils import counters
        from train.backend.compiled import TorchCompiler
        from train.backend.kernel_cache import KernelCache
        from train.config import BackendConfig, S3Config
        cache = KernelCache(sys.argv[1], S3Config(**json.loads(sys.argv[2])), may_write=True)
        compiler = TorchCompiler(BackendConfig(compile="model"), {"device": "cpu"}, cache)
        class Model(torch.nn.Linear):
            def forward(self, values):
                return super().forward(values).tanh()
        model, values = Model(4, 4), torch.ones(int(sys.argv[3]), 4)
        compiler.compile(model)
        for _ in range(2):
            model(values).sum().backward()
        with torch.no_grad():
            model.eval()(values)
        compiler.close()
        print("HITS", counters["aot_autograd"]["autograd_cache_hit"], compiler.compiled)
    """
    hits, keys = [], []
    for machine, size in (("first", 2), ("second", 3), ("third", 2)):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / machine)}
        words = ["-c", code, bucket.location("kernels"), json.dumps(asdict(bucket.config())), str(size)]
        if machine == "third":
            (damaged,) = set(keys[1]) - set(keys[0])  # the second's, of which this one has no need
            bucket.put(damaged, bucket.get(damaged)[:-1] + b"?")
        done = run_forked(words, env)
        assert "HITS" in done.stdout, done.stderr
        hits.append(done.stdout.split("HITS ")[1].strip())
        keys.append(bucket.keys())
    assert hits == ["0 2", "0 2", "2 2"] and [len(some) for some in keys] == [1, 2, 2]
    assert "is damaged; its graphs are compiled again" in done.stderr


def test_a_cache_that_one_rank_cannot_read_stops_nobody(bucket, log):
    KernelCache("s3://there-is-no-such-bucket/kernels", bucket.config(), may_write=False).load({})
    assert "kept graphs cannot be read and are compiled again" in log.text
