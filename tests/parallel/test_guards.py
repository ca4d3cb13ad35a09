"""What would go wrong without an error is rejected or said: each guard, provoked.

Under torchrun this file is also the program of its own ranks, see `PROGRAMS`.
"""

import contextlib
import functools
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rejections import rejects
from running import eventually, lines, run, train_overrides
from torch import nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

from train import entry
from train.checkpoints.manifest import Manifest, Progress
from train.checkpoints.saver import AsyncSaver
from train.checkpoints.store import LocalStore
from train.config import (
    BackendConfig,
    CheckpointConfig,
    InputError,
    InstanceConfig,
    OptimConfig,
    XLAConfig,
)
from train.data.batches import loader
from train.data.batches.loader import MaskedRows
from train.machine import host, neuron
from train.machine.launched import check_launch, launched
from train.parallel import guards, xla_environment
from train.parallel.backends import open_backend
from train.parallel.ddp import DDP
from train.parallel.engines import Engine
from train.parallel.graphs import GraphBudget
from train.parallel.optim import build_optimizer, set_learning_rate
from train.run import compose as cli

pytest.importorskip("torch_xla")

# One layer: nothing here depends on the depth, and it compiles in seconds.
XLA = [
    "backend=xla",
    "model.num_layers=1",
    "eval_every=null",
    "export=false",
    "checkpoint.every=100",
]
TRN1 = {
    "torch": "2.9.1",
    "torch-xla": "2.9.0",
    "torch-neuronx": "2.9.0.2.15.32035+abc",
    "neuronx-cc": "2.26.6360.0",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No launcher's or Neuron's variables, before and after; and a failure that would end pytest itself is raised."""

    def leave(code):
        raise AssertionError(f"the rank would have left with {code}")

    monkeypatch.setattr(os, "_exit", leave)
    with mock.patch.dict(os.environ):
        for name in [*os.environ]:
            if name.startswith(("NEURON", "SLURM", "XLA_", "XRT_", "PJRT", "FI_", "BUCKET")):
                del os.environ[name]
        os.environ["PJRT_DEVICE"] = "CPU"  # else torch_xla warns that it chooses
        yield


@pytest.fixture
def train(monkeypatch, capfd, tmp_path, prepared):
    """`baretrain train` in this process: returns its exit code and the lines on stderr."""

    def call(*overrides):
        monkeypatch.setattr(
            sys, "argv", ["train", *train_overrides(tmp_path / "run", prepared, *overrides)]
        )
        code = entry.main(sys.argv[1:])
        return code, capfd.readouterr().err.splitlines()

    return call


def rejection(result):
    """The one line of a run that was rejected."""
    code, lines = result
    (line,) = (line for line in lines if not line.startswith("starting "))
    assert code == cli.REJECTED and line.startswith("error: ")
    return line


@pytest.fixture
def machine_has(monkeypatch):
    """What this machine has, by names of functions; nothing of Neuron's or NVIDIA's to begin with."""

    def has(**facts):
        for name, value in facts.items():
            monkeypatch.setattr(
                neuron if name == "neuron_devices" else host, name, lambda *_, value=value: value
            )

    has(neuron_devices=[], nvidia_gpus=[])
    return has


# ---- where it runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["backend.device=auto"], "there is no /dev/neuron0"),
        ([], "has neuron devices, but backend.device=cpu; set instance=local"),
        (["backend=ddp", "backend.device=auto"], "set backend=xla on trn1"),
        (
            ["instance=p5.48xlarge", "backend=xla", "backend.device=auto"],
            "set backend=ddp for GPUs",
        ),
    ],
)
def test_a_run_goes_to_no_other_device_than_the_instance_has(train, machine_has, overrides, said):
    """PJRT_DEVICE may be left over from a test of somebody's: the instance counts for more."""
    machine_has(installed_versions=TRN1)
    instance = [] if overrides[:1] == ["instance=p5.48xlarge"] else ["instance=trn1.32xlarge"]
    assert said in rejection(train(*instance, *overrides))


def test_a_device_that_is_not_what_the_runtime_says_is_rejected(monkeypatch):
    """The variable says NEURON, and what was opened is a CPU."""
    from train.parallel import xla

    monkeypatch.setattr(xla.xr, "device_type", lambda: "NEURON")
    rejects("PJRT_DEVICE=NEURON, but PyTorch/XLA opened CPU", xla.XLA, XLAConfig(device="neuron"))


GPU = ["0000:00:1e.0"]


@pytest.mark.parametrize(
    ("kind", "gpus", "said"),
    [
        (
            "trn1.32xlarge",
            [],
            "this is a trn1.32xlarge without /dev/neuron0: its driver is not loaded",
        ),
        (
            "p6-b200.48xlarge",
            GPU,
            "this p6-b200.48xlarge has an NVIDIA GPU that PyTorch cannot use: no driver",
        ),
        ("Standard PC", GPU, None),  # a laptop costs nothing by the hour
    ],
)
def test_a_machine_whose_devices_have_no_driver_is_no_cpu_unless_that_is_said(
    machine_has, log, kind, gpus, said
):
    machine_has(instance_type=kind, nvidia_gpus=gpus)
    for name in ("auto", "ddp") if said else ():
        rejects(said, open_backend, BackendConfig(name=name), InstanceConfig())
    device = "cpu" if said else "auto"
    assert open_backend(BackendConfig(device=device), InstanceConfig()).device.type == "cpu"
    noted = {"Standard PC": "training on the CPU"}
    assert noted.get(kind, "") in log.text and len(log.messages) == (kind in noted)


RANKS = {  # of an instance, in all and on each machine: what is said if they hang, or None
    ("trn1.32xlarge", 16, 16): "16 ranks on one machine: trn1.32xlarge runs 1 or 2 or 8 or 32",
    ("trn1.32xlarge", 16, 8): "8 ranks on each of 2 machines: several trn1.32xlarge work",
    ("trn1.2xlarge", 8, 8): "trn1.2xlarge runs 1 or 2; start torchrun with --nproc-per-node=2",
    **{("trn1.32xlarge", *ranks): None for ranks in ((1, 1), (2, 2), (8, 8), (32, 32), (64, 32))},
}


def launched_as(world, local):
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local),
    }
    return {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("instance", "world", "local"), RANKS)
def test_numbers_of_ranks_that_hang_are_rejected(instance, world, local):
    _, cfg = cli.load_backend([f"instance={instance}"])
    said = RANKS[instance, world, local]
    with pytest.raises(InputError, match=said) if said else contextlib.nullcontext():
        check_launch(
            cfg,
            launched({**launched_as(world, local), "SLURM_STEP_NUM_TASKS": str(world // local)}),
        )


@pytest.mark.parametrize(
    ("variables", "is_rejected"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "2"}, True),
        ({"MV2_COMM_WORLD_SIZE": "3"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": ""}, False),
        (
            {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4"},
            False,
        ),  # of salloc or sbatch, whose script is one process
        (
            {"OMPI_COMM_WORLD_SIZE": "2", **launched_as(8, 4)},
            False,
        ),  # mpirun started a torchrun on each machine
    ],
)
def test_processes_that_would_each_train_alone_are_rejected(variables, is_rejected):
    says = r"several processes were started without torchrun \(\w+=[234]\): each would train alone"
    with pytest.raises(InputError, match=says) if is_rejected else contextlib.nullcontext():
        check_launch(InstanceConfig(), launched(variables))


# ---- the environment -----------------------------------------------------------------------------------------------


def test_variables_that_change_what_is_computed_are_rejected(monkeypatch):
    for name, why in neuron.BAD_VARIABLES.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            said = re.escape(f"{name}=1 {why}")
            rejects(said, xla_environment.ready, XLAConfig(device="cpu"))
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    monkeypatch.setenv(xla_environment.COLLECTS, "1")  # set by precompile, whose run is for it
    xla_environment.ready(XLAConfig(device="cpu"))


@pytest.fixture
def on_trainium(machine_has, monkeypatch):
    """A machine that has the devices and the packages, as a process finds it that has not imported torch_xla yet.
    Returns the versions, which may be changed.
    """
    versions = dict(TRN1)
    monkeypatch.delitem(sys.modules, "torch_xla")
    machine_has(neuron_devices=["/dev/neuron0"], installed_versions=versions)
    return versions


def test_the_runtime_is_told_before_it_is_loaded(on_trainium, monkeypatch, log):
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    os.environ.update({**launched_as(4, 2), "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "head"})
    del os.environ["PJRT_DEVICE"]
    xla_environment.ready(XLAConfig(precision="bf16_stochastic"))
    assert os.environ["PJRT_DEVICE"] == "NEURON"
    assert os.environ["NEURON_RT_ROOT_COMM_ID"] == f"head:{neuron.ROOT_COMM_PORT}"
    assert os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    assert os.environ["NEURON_CC_FLAGS"].startswith("-O1 --model-type=transformer")
    assert "s3://bucket/cache" in log.messages[-1]


NEURON0 = ["/dev/neuron0"]


@pytest.mark.parametrize(
    ("device", "variable", "devices", "kind"),
    [
        ("auto", None, NEURON0, "NEURON"),
        ("auto", None, [], "CPU"),
        ("neuron", "CPU", NEURON0, "NEURON"),
        ("cpu", "NEURON", [], "CPU"),
        ("auto", "CPU", NEURON0, "on a machine with Trainium"),
        ("cuda", "CPU", NEURON0, "not on CUDA"),
        ("auto", "NEURON", [], "no Trainium here"),
    ],
)
def test_the_device_of_xla_is_what_was_asked_for_if_it_is_there(
    machine_has, device, variable, devices, kind
):
    machine_has(neuron_devices=devices)
    del os.environ["PJRT_DEVICE"]
    os.environ.update({"PJRT_DEVICE": variable} if variable else {})
    if kind in ("CPU", "NEURON"):
        assert xla_environment.choose_device(device) == kind
    else:
        rejects(kind, xla_environment.choose_device, device)


# ---- compilers -----------------------------------------------------------------------------------------------------


def test_another_thread_sees_that_a_graph_is_being_compiled():
    from train.parallel import xla

    backend = xla.XLA(XLAConfig(device="cpu"))
    value = torch.rand(64, 64, device=backend.device)
    xla.torch_xla.sync()
    for number in range(200):
        value = torch.sin(value * (2 + number)) @ value
    assert not backend.is_compiling()
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(eventually, backend.is_compiling, 60)
        xla.torch_xla.sync()
        assert seen.result()
    assert not backend.is_compiling()


# ---- several ranks -------------------------------------------------------------------------------------------------


def failure(call, *arguments):
    """The message of a RuntimeError, empty if there was none."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    return ""


def went_on():
    raise RuntimeError("rank 1 went on")


def rank_of_two(folder):
    """What one of two ranks finds, left as JSON."""
    from train.parallel import xla

    backend = xla.XLA(XLAConfig(device="cpu", timeout_s=60))
    result = {
        "world": [
            backend.world.rank,
            backend.world.size,
            backend.world.sum([1.0, float(backend.world.rank)]),
        ]
    }
    backend.seed(7)
    result["drawn"] = torch.rand(4, device=backend.device).tolist()
    result["kept"] = backend.rng_state()["xla"]

    add, dist.all_reduce = dist.all_reduce, lambda *_, **__: mock.Mock()  # sums that reach nobody
    result["ones"] = failure(backend.check_world)
    dist.all_reduce = add
    xla.xm.set_rng_state(101)  # what torch_xla starts from
    xla.xm.set_rng_state = lambda seed: None
    result["seeds"] = failure(backend.seed, 7)

    torch.manual_seed(0)
    model = Tied()
    backend.setup_model(model)
    engine = Engine(backend, model, adamw_of(backend, model))
    result["same"] = failure(engine.check_replicas)
    if backend.world.rank == 1:
        model.norm.bias.data += 0.5
        backend.rng_state = went_on  # else it would wait for rank 0, as it should
    store = LocalStore(Path(folder) / "saved")
    draft = Manifest(0, 1, {}, {}, {}, 2, "ddp", None)
    run_folder = SimpleNamespace(ownership=SimpleNamespace(check=print), mirror=print)
    saver = AsyncSaver(CheckpointConfig(), store, engine, backend, draft, run_folder)
    result["other"] = failure(functools.partial(saver.save, Progress(), {}, metric=None))
    saver.close(waits=True)
    result["saved"] = (Path(folder) / "saved").exists()
    backend.close()

    # What happens on Trainium if the runtime does not know of the other ranks: on CPUs it never does.
    xla.xr.device_type, xla.xm.xla_device_hw = lambda: "NEURON", lambda device: "NEURON"
    result["apart"] = failure(xla.XLA, XLAConfig(device="neuron", timeout_s=60))
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


def bad_evaluation(*arguments):
    """A run in which rank 1 cannot use the data of the evaluation."""
    draw = MaskedRows.draw

    def drawn(self, items):
        if not self.is_training and os.environ["RANK"] == "1":
            raise InputError("validation.bin is short")
        return draw(self, items)

    MaskedRows.draw = drawn
    sys.argv[1:] = arguments
    sys.exit(entry.main(sys.argv[1:]))


PROGRAMS = {"ranks": rank_of_two, "evaluation": bad_evaluation}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = run(["ranks", str(folder)], ranks=2, module=__file__, env={"PJRT_DEVICE": "CPU"})
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_two_cpu_ranks_of_xla_know_each_other_and_draw_different_numbers(ranks):
    assert [result["world"] for result in ranks] == [[0, 2, [2.0, 1.0]], [1, 2, [2.0, 1.0]]]
    assert not set(ranks[0]["drawn"]) & set(ranks[1]["drawn"])
    assert ranks[0]["kept"] != ranks[1]["kept"]


def test_ranks_that_the_device_runtime_does_not_join_or_that_draw_alike_are_rejected(ranks):
    for result in ranks:
        assert (
            "the launcher started 2 ranks, the device runtime sees 1, the process group 1, and"
            in result["apart"]
        )
        assert "they would train apart" in result["apart"]
    assert (
        "ranks share random states [101, 101]: their dropout would be the same"
        in ranks[0]["seeds"]
    )


def test_sums_that_reach_nobody_are_rejected(ranks):
    for result in ranks:
        assert "the process group 2, and ones summed over the ranks give 1" in result["ones"]


def test_weights_in_which_ranks_differ_are_not_saved(ranks):
    assert [result["same"] for result in ranks] == ["", ""]
    first, second = (result["other"] for result in ranks)
    assert "ranks [1] have different weights from rank 0" in first
    assert second == "rank 1 went on"
    assert not any(result["saved"] for result in ranks)


def test_a_rank_that_cannot_read_the_data_of_an_evaluation_ends_the_run_with_the_reason(
    prepared, tmp_path
):
    """On both: the other one would wait for its sums until the timeout."""
    options = ["max_steps=1", "optim.warmup_steps=1", "eval_every=1", "backend.timeout_s=60"]
    arguments = ["evaluation", *train_overrides(tmp_path / "run", prepared, *options)]
    done = run(arguments, ranks=2, module=__file__)
    assert done.returncode != 0
    ended = json.loads((tmp_path / "run/outcome.json").read_bytes())
    assert ended["reason"] == "rejected: validation.bin is short", done.stderr
    # the trial of an evaluation met it before the first step
    assert not lines(tmp_path / "run", "train")
    assert not LocalStore(tmp_path / "run/checkpoints").steps()


# ---- weights -------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding and a head that share their weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(13, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 13),
        )
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


def open_xla(**settings):
    from train.parallel.xla import XLA as Backend

    return Backend(XLAConfig(device="cpu", **settings))


def open_ddp():
    return DDP(BackendConfig(device="cpu"))


def step_of(backend, model, optimizer, ids, scale=1.0):
    (model(ids.to(backend.device)).sum(-1).pow(2).sum() * scale).backward()
    parameters = list(model.parameters())
    backend.unscale(optimizer, parameters)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    backend.optimizer_step(optimizer, parameters, norm)
    return norm


def adamw_of(backend, model, *, lr=0.1):
    """As the loop makes it, without decay: a step changes what has a gradient."""
    cfg = OptimConfig(lr=lr, weight_decay=0.0)
    return build_optimizer(cfg, model.parameters(), adamw=backend.adamw)


IDS = torch.arange(10).view(2, 5)


def untie(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def test_xla_unties_weights_and_the_backend_ties_them_again():
    backend, model = open_xla(), Tied()
    backend.setup_model(model)
    assert model.head.weight is model.embedding.weight and model.head.weight.device.type == "xla"
    assert len(list(model.parameters())) == 4
    untie(model)  # as a checkpoint that is restored may
    parameters = list(model.parameters())
    rejects(
        "no longer share a weight",
        backend.ready,
        torch.optim.SGD(parameters),
        parameters,
        error=RuntimeError,
    )


@pytest.mark.parametrize("open_backend", [open_xla, open_ddp])
def test_the_optimizer_holds_all_of_the_models_parameters_and_no_other(open_backend):
    backend, model = open_backend(), Tied()
    # from before the move, which makes new parameters on XLA
    early = torch.optim.SGD(model.parameters())
    backend.setup_model(model)
    parameters = list(model.parameters())
    wrong = [(torch.optim.SGD(parameters[1:]), "holds 3 of the model's 4")]
    wrong += [(torch.optim.SGD(Tied().parameters()), "holds 0 of")]
    if open_backend is open_xla:
        wrong.append((early, "holds 0 of the model's 4 parameters and 4 that are not the model's"))
    for optimizer, said in wrong:
        rejects(said, backend.ready, optimizer, parameters, error=RuntimeError)
    backend.ready(adamw_of(backend, model), parameters)


def begun(backend=None, model=None, *, lr=0.1):
    """A run before its first step."""
    backend, model = backend or open_xla(), model or Tied()
    backend.setup_model(model)
    optimizer = adamw_of(backend, model, lr=lr)
    backend.ready(optimizer, list(model.parameters()))
    return backend, model, optimizer


def test_a_first_step_that_changes_no_weights_is_rejected(monkeypatch):
    backend, model, optimizer = begun()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: None)
        rejects(
            "the first step changed no weights",
            step_of,
            backend,
            model,
            optimizer,
            IDS,
            error=RuntimeError,
        )
    rejects("the gradient is 0 everywhere", step_of, *begun(), IDS, error=RuntimeError, scale=0.0)
    with pytest.raises(RuntimeError, match="the learning rate is too small for the precision"):
        step_of(*begun(lr=1e-60), IDS)  # nothing in float32
    backend, model, optimizer = begun()
    step_of(backend, model, optimizer, IDS)
    set_learning_rate(optimizer, 0.0)
    step_of(backend, model, optimizer, IDS)  # later ones are not looked at
    # Nor is that of a resumed run, with moments from a checkpoint: its rate may leave bf16 weights as they are.
    backend.ready(optimizer, list(model.parameters()))
    step_of(backend, model, optimizer, IDS)


# ---- masks ---------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def encoder(kind, attention):
    torch.manual_seed(0)
    config = AlbertConfig(**SIZES, embedding_size=4) if kind == "albert" else BertConfig(**SIZES)
    config._attn_implementation = attention
    return (AlbertModel if kind == "albert" else BertModel)(config).eval()


@pytest.mark.parametrize(("kind", "attention"), [("albert", "eager"), ("bert", "sdpa")])
def test_only_a_float_mask_of_four_dimensions_passes_and_it_hides_the_same(kind, attention):
    watched, plain = encoder(kind, attention), encoder(kind, attention)
    guards.watch_masks(watched)
    looks = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    four = looks[:, None, None]
    additive = (1 - four.float()) * -1e4
    for mask in (looks, looks.float(), four.bool(), four):
        seen = (
            f"{type(watched).__name__} was given an attention mask {[*mask.shape]} of {mask.dtype}"
        )
        said = f"{re.escape(seen)}.*{re.escape('a float mask [batch, 1, 1, seq]')}"
        rejects(said, watched, input_ids=IDS, attention_mask=mask)
        rejects(said, watched, IDS, mask)  # by its place
    result = watched(input_ids=IDS, attention_mask=additive).last_hidden_state
    wanted = plain(input_ids=IDS, attention_mask=looks).last_hidden_state
    # A weight of exp(-1e4) is 0 in float32, as behind transformers' own mask: only the order of sums may differ.
    torch.testing.assert_close(result[looks.bool()], wanted[looks.bool()], rtol=1e-5, atol=1e-6)
    square = additive.expand(2, 1, 5, 5)
    torch.testing.assert_close(
        watched(input_ids=IDS, attention_mask=square).last_hidden_state, result
    )
    whole = plain(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(watched(input_ids=IDS).last_hidden_state, whole)
    torch.testing.assert_close(
        watched(input_ids=IDS, attention_mask=None).last_hidden_state, whole
    )


# ---- batches -------------------------------------------------------------------------------------------------------


def test_an_exception_of_the_data_reaches_the_user_after_the_steps_before_it(
    train, monkeypatch, tmp_path
):
    draw, numbers = MaskedRows.draw, {}

    def fails(self, items):
        if self.is_training and numbers.setdefault(items.tobytes(), len(numbers)) == 3:
            raise OSError(5, "Input/output error", "train-00001.bin")
        return draw(self, items)

    monkeypatch.setattr(MaskedRows, "draw", fails)
    monkeypatch.setattr(loader, "MULTI_BATCH", 1)
    code, err = train(*XLA)
    assert code == cli.FAILED
    assert any("[Errno 5] Input/output error: 'train-00001.bin'" in line for line in err)
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 2, 3]
    assert "Input/output error" in lines(tmp_path / "run", "fault")[0]["reason"]


# ---- the graph budget ----------------------------------------------------------------------------------------------


def steps_of(scales, lengths):
    """Steps on sequences of lengths that no other test here compiles, in a backend that allows one graph."""
    backend, model, optimizer = begun(open_xla())
    backend.budget.limit = 1
    batches = backend.to_device(
        {"inputs": {"ids": torch.arange(length)[None] % 13}, "count": 1} for length in lengths
    )
    with contextlib.closing(batches):
        for batch, scale in zip(batches, scales, strict=True):
            step_of(backend, model, optimizer, batch["inputs"]["ids"], scale=scale)
    return backend.budget.used


def test_a_graph_too_many_is_explained_and_ends_a_run_on_the_cpu():
    assert steps_of([0.5] * 4, [7] * 4) == 1
    said = "graph 2 was compiled, but only 1 are expected; look for an input that changed"
    with pytest.raises(RuntimeError, match=said):
        steps_of([0.5] * 4, [8, 8, 9, 8])
    with pytest.raises(RuntimeError, match=said):
        steps_of([0.5, 0.0], [11, 11])  # a Python number becomes 0


def test_on_trainium_each_graph_too_many_is_one_warning_and_those_from_before_the_first_batch_do_not_count(
    log,
):
    budget = GraphBudget(iter([5, 6, 7, 7, 7, 8]).__next__, is_fatal=False, hint="")
    budget.limit = 1
    budget.start()
    budget.start()  # of a second stream, which does not move the start
    for _ in range(5):
        budget.check()
    assert [text.split(",")[0] for text in log.messages] == [
        "graph 2 was compiled",
        "graph 3 was compiled",
    ]


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
