"""Native PyTorch on Trainium, on a CPU that is called its device: what differs from DDP. Not run on hardware.

Under torchrun this file is also the program of its own ranks: `baretrain train` on such a machine.
"""

import importlib
import importlib.machinery
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rejections import rejects
from run_results import TOLERANCE, assert_same_weights, losses, weights
from running import ROOT, lines, run, train_config, train_overrides

from train import __main__ as program
from train import loop
from train.config import BackendConfig, InputError, InstanceConfig, NeuronConfig
from train.machine import host, rank_setup
from train.machine import neuron as neuron_facts
from train.observe import monitor_neuron, profile
from train.observe.metrics import Recorder
from train.parallel import ddp, neuron, xla_environment
from train.parallel.backend import load
from train.parallel.backends import open_backend
from train.parallel.ddp import DDP
from train.run.stopping import StopRequest

VERSION = "2.14.3.0.1"


def pretend(put, versions):
    """Make this machine one of trn2, by `put(object, name, value)`: its device is the CPU, its collectives are gloo,
    and neuron-monitor is not installed. Returns the package.
    """
    put(neuron, "DEVICE", "cpu")
    put(neuron, "COLLECTIVES", "gloo")
    put(monitor_neuron, "TOOL", "no-neuron-monitor")
    put(neuron_facts, "neuron_devices", lambda: ["/dev/neuron0"])
    put(
        host,
        "installed_versions",
        lambda *names: {n: v for n, v in versions.items() if n in names},
    )
    package = types.ModuleType("torch_neuronx")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_neuronx", None)
    package.fallen_back = []  # as the public source of TorchNeuron has it
    package.get_fallback_ops = lambda: package.fallen_back
    package.clear_op_tracking = package.fallen_back.clear
    return package


@pytest.fixture
def versions(monkeypatch):
    """On such a machine; returns the versions of its packages."""
    result = {"torch": "2.14.0", "torch-neuronx": VERSION}
    monkeypatch.setitem(sys.modules, "torch_neuronx", pretend(monkeypatch.setattr, result))
    with mock.patch.dict(os.environ):  # the backend sets the runtime's variables
        yield result


NEURON = ["backend=neuron", "backend.device=auto"]


def train(run_dir, data, *overrides):
    assert loop.run(train_config(run_dir, data, *overrides), StopRequest()) == ("done", 6)
    return run_dir


# ---- the same run as DDP -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory, prepared):
    """With the plain AdamW, which is the one of the Neuron backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDP, "adamw", neuron.Neuron.adamw)
        return train(tmp_path_factory.mktemp("runs") / "ddp", prepared)


def test_a_run_is_that_of_ddp_bit_for_bit_and_a_missing_tool_only_a_note(
    versions, by_ddp, prepared, tmp_path, monkeypatch
):
    opened, real = {}, loop.open_monitor
    monkeypatch.setattr(
        loop, "open_monitor", lambda kind, **rest: opened.update(rest) or real(kind, **rest)
    )
    monkeypatch.setenv("NEURON_PROCESS_TAG", "run_a")
    result = train(tmp_path / "run", prepared, *NEURON)
    assert opened["run_tag"] == "run_a"  # else it would count the devices of another run as well
    assert losses(result) == losses(by_ddp) and losses(result)[-1] < losses(result)[0]
    assert_same_weights(result, by_ddp)
    (summary,) = lines(result, "summary")
    assert summary["backend"] == "neuron"
    assert not lines(result, "fault")
    log = (result / "log/rank_0000.txt").read_text()
    assert (
        log.count("no-neuron-monitor is neither on PATH nor in")
        == log.count("training continues")
        == 1
    )


PIPELINE = "parallel=pipeline parallel.stages=2 parallel.micro_batches=2 micro_batch_size=4"


@pytest.mark.parametrize(
    "split", ["micro_batch_size=2", "parallel=fsdp micro_batch_size=4", PIPELINE]
)
def test_two_ranks_are_one(by_ddp, prepared, tmp_path, monkeypatch, split):
    """AWS's documents say that FSDP2 and pipelines are supported; not run on hardware."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests:{ROOT}/tests/parallel")
    done = run(
        train_overrides(tmp_path / "run", prepared, *NEURON, *split.split()),
        ranks=2,
        module="test_neuron",
    )
    assert done.returncode == 0, done.stderr
    (summary,) = lines(tmp_path / "run", "summary")
    assert (summary["backend"], summary["world_size"]) == ("neuron", 2)
    assert losses(tmp_path / "run") == pytest.approx(losses(by_ddp), rel=TOLERANCE)
    for name, tensor in weights(by_ddp).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], tensor, rtol=1e-3, atol=2e-5)


def as_rank(monkeypatch, rank, ranks, machines=1):
    """Be a rank of this many, which never joins others."""
    local = ranks // machines
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
    }
    for name, value in {**numbers, "MASTER_ADDR": "a", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ddp, "join", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: ranks)


def test_operators_that_others_could_have_compiled_are_rejected(versions, monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setenv(neuron_facts.NATIVE_CACHE, str(tmp_path))
    rejects("can be written to by others", neuron.Neuron, BackendConfig(device="neuron"))


def test_ranks_that_do_not_reach_each_other_are_rejected(versions, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    with pytest.raises(
        RuntimeError, match="the process group 2, and ones summed over the ranks give 1"
    ):
        neuron.Neuron(BackendConfig(device="neuron"))


@pytest.mark.parametrize("machines", [1, 2])
def test_the_runtime_opens_only_after_its_variables_package_and_group(
    versions, monkeypatch, machines
):
    """TorchNeuron's process group asserts that nothing has opened the runtime; the runtime reads variables once."""
    as_rank(monkeypatch, 1, 2, machines)
    efa = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    for name in efa:
        monkeypatch.delenv(name, raising=False)
    order, real, ones = [], importlib.import_module, torch.ones

    def import_module(name, *rest):
        if name == "torch_neuronx":
            order.append((name, {key: os.environ[key] for key in efa if key in os.environ}))
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(rank_setup, "neuron_address", lambda environ, core: f"chip of core {core}")
    monkeypatch.setattr(rank_setup, "pin", order.append)
    monkeypatch.setattr(ddp, "join", lambda names, *_, **__: order.append(names))
    monkeypatch.setattr(
        torch, "ones", lambda *size, **given: (order.append("device"), ones(*size, **given))[1]
    )
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    neuron.Neuron(BackendConfig(device="neuron"))
    assert order == [
        ("torch_neuronx", efa if machines == 2 else {}),
        f"chip of core {2 - machines}",
        "gloo",
        "device",
    ]


@pytest.mark.parametrize(
    ("asked", "chosen"), [("auto", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")]
)
def test_the_precision_is_bf16_unless_asked(versions, asked, chosen):
    backend = neuron.Neuron(BackendConfig(precision=asked))
    assert (backend.precision, backend.monitor_kind, backend.pin_memory) == (
        chosen,
        "neuron",
        False,
    )
    with backend.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if chosen == "bf16" else torch.float32)


# ---- what is its own -----------------------------------------------------------------------------------------------


def test_the_update_is_waited_for_and_of_all_weights_at_once(
    versions, prepared, tmp_path, monkeypatch
):
    """Launches are asynchronous: an update of many weights failed where nothing waited for it."""
    seen, step = [], torch.optim.AdamW.step

    def recorded(optimizer, *arguments):
        seen.append(optimizer.defaults["foreach"])
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.cpu, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    train(tmp_path / "run", prepared, *NEURON)
    assert seen == ["wait", "wait", True, "wait"] * 6  # around both passes, and after the update


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_operators_that_fell_back_to_the_cpu_are_named_once(
    versions, prepared, tmp_path, monkeypatch, kind
):
    package, forward = sys.modules["torch_neuronx"], torch.nn.Embedding.forward

    def fall_back(module, ids):
        if torch.is_grad_enabled() == (kind == "train"):
            package.fallen_back[:] = ["aten::sort.stable"]
        return forward(module, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", fall_back)
    train(tmp_path / "run", prepared, *NEURON)
    (named,) = lines(tmp_path / "run", "fault")
    assert "aten::sort.stable; their tensors are copied" in named["reason"]
    assert named["step"] == (1 if kind == "train" else 3)
    assert (tmp_path / "run/log/rank_0000.txt").read_text().count(named["reason"]) == 1


def test_what_ran_on_the_cpu_before_the_first_step_is_no_fallback(versions, prepared, tmp_path):
    sys.modules["torch_neuronx"].fallen_back.append("aten::normal_")
    train(tmp_path / "run", prepared, *NEURON)
    assert lines(tmp_path / "run", "fault") == []


def test_a_package_that_does_not_tell_of_fallbacks_trains(versions, prepared, tmp_path):
    del (
        sys.modules["torch_neuronx"].get_fallback_ops,
        sys.modules["torch_neuronx"].clear_op_tracking,
    )
    train(tmp_path / "run", prepared, *NEURON)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resume_with_dropout_warns_once(versions, prepared, tmp_path, dropout):
    settings = [*NEURON, f"model.hidden_dropout={dropout}"]
    asked = StopRequest()
    asked.reason = "SIGTERM"
    assert loop.run(train_config(tmp_path / "run", prepared, *settings), asked) == ("SIGTERM", 1)
    log = tmp_path / "run/log/rank_0000.txt"
    said = "dropout may not repeat exactly on a NeuronCore"
    assert said not in log.read_text()
    train(tmp_path / "run", prepared, *settings)
    assert log.read_text().count(said) == (1 if dropout else 0)


def test_a_profile_has_the_traces_of_the_runtime(versions, prepared, tmp_path, monkeypatch):
    profiling, asked, traced = (
        types.ModuleType("torch_neuronx.profiling"),
        [],
        torch.profiler.profile,
    )

    def configure(modes, profile_output_dir):
        folder = Path(profile_output_dir) / "host"
        folder.mkdir(parents=True)
        (folder / "runtime.ntff").write_bytes(b"trace")
        asked.append(modes)
        return torch._C._profiler._ExperimentalConfig()

    def recorded(**given):
        asked.append(given["activities"])
        # this torch has no other device
        return traced(activities=[torch.profiler.ProfilerActivity.CPU])

    profiling.ProfileMode, profiling.NeuronConfig = (
        types.SimpleNamespace(RUNTIME="runtime", DEVICE="5 GB"),
        configure,
    )
    monkeypatch.setitem(sys.modules, "torch_neuronx.profiling", profiling)
    monkeypatch.setattr(torch.profiler, "profile", recorded)
    monkeypatch.setattr(
        torch, "neuron", types.SimpleNamespace(max_memory_allocated=lambda: 5), raising=False
    )
    monkeypatch.setattr(neuron.Neuron, "fallback_ops", lambda backend: {"aten::addmm.out"})
    monkeypatch.setattr(profile, "FIRST", 2)
    monkeypatch.setattr(profile, "STEPS", 2)
    result = train(tmp_path / "run", prepared, *NEURON, "profile=true")
    assert asked == [
        ["runtime"],
        [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1],
    ]
    assert (result / "profile/device/host/runtime.ntff").read_bytes() == b"trace"
    assert "aten::addmm" in (result / "profile/table.txt").read_text()
    assert lines(result, "summary")[0]["peak_device_bytes"] == 5
    # one trace at a time
    assert not any("in this step" in line["reason"] for line in lines(result, "fault"))


def test_the_watchdog_sees_a_rank_that_compiles(versions, monkeypatch):
    as_rank(monkeypatch, 0, 1)
    backend = neuron.Neuron(NeuronConfig(compile="layers"))
    assert not backend.compilers.are_busy()
    backend.compiler.begin()
    assert backend.compilers.are_busy()
    backend.compiler.end()


def test_the_runtime_waits_as_long_as_a_collective(versions, monkeypatch):
    for name in ("NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_NUM_CORES"):
        monkeypatch.delenv(name, raising=False)
    neuron.Neuron(BackendConfig(timeout_s=99))
    assert (os.environ["NEURON_RT_EXEC_TIMEOUT"], os.environ["NEURON_RT_NUM_CORES"]) == ("99", "1")


def test_it_compiles_with_neurons_own_compiler(versions, by_ddp, prepared, tmp_path):
    options = []

    def compiler(graph, inputs, **given):
        options.append(given)
        return graph.forward

    torch._dynamo.register_backend(compiler, name="neuron")
    for what in ("layers", "model"):
        result = train(tmp_path / what, prepared, *NEURON, f"backend.compile={what}")
        assert len(options) >= 2 and not any(options)  # none of Inductor's
        options.clear()
        assert losses(result) == pytest.approx(losses(by_ddp), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "instance", "chosen"),
    [
        ("trn2.48xlarge", "local", "neuron"),
        (
            "trn3.48xlarge",
            "local",
            "neuron",
        ),  # as the driver knows it; EC2's API names no type of trn3 yet
        ("", "trn2.3xlarge", "neuron"),
        ("trn1.2xlarge", "local", "xla"),
        ("trn2.48xlarge with the package for XLA", "local", "xla"),
    ],
)
def test_auto_is_native_on_trn2_and_trn3_and_xla_on_trn1(
    versions, monkeypatch, log, kind, instance, chosen
):
    opened = []
    versions.update({"torch-neuronx": "2.9.0.2.15.32035"} if "for XLA" in kind else {})
    monkeypatch.setattr(host, "instance_type", lambda: kind)
    monkeypatch.setattr(neuron, "Neuron", lambda cfg: opened.append("neuron"))
    monkeypatch.setattr(xla_environment, "ready", lambda *_, **__: opened.append("xla"))
    monkeypatch.setattr("train.parallel.xla.XLA", lambda cfg, collects: None)
    open_backend(BackendConfig(), InstanceConfig(name=instance))
    assert opened == [chosen]
    setting = (
        f"set instance={kind} to"
        if kind in host.instance_names()
        else f"set instance.name={kind} and its"
    )
    assert (setting in log.text) == (instance == "local")


def fill(tensor, *values):
    tensor.copy_(torch.tensor(values))


COLLECTIVES = {  # what each leaves on rank 0 of 2, and what is said where it leaves nothing
    "all_gather_into_tensor": (
        lambda whole, own: fill(whole, 1.0, 2.0),
        r"all-gather returns [0.0, 0.0]",
    ),
    "reduce_scatter_tensor": (
        lambda part, numbers: fill(part, 2.0),
        "reduce-scatter returns [0.0] instead",
    ),
    "batch_isend_irecv": (
        lambda both: fill(both[1], 2.0) or [],
        "send and receive returns [0.0] instead",
    ),
    "all_reduce": (
        lambda own, group: fill(own, 3.0),
        "all-reduce of some ranks returns [1.0] instead of [3]",
    ),
}


@pytest.mark.parametrize("broken", [None, *COLLECTIVES])
def test_a_model_is_not_split_by_collectives_that_do_not_work(versions, monkeypatch, broken):
    backend = neuron.Neuron(BackendConfig())
    backend.world = types.SimpleNamespace(rank=0, size=2)
    monkeypatch.setattr(DDP, "mesh", lambda backend: "mesh")
    monkeypatch.setattr(DDP, "subgroup", lambda backend, ranks: "group")
    monkeypatch.setattr(dist, "P2POp", lambda does, tensor, peer, group: tensor)
    for name, (does, _) in COLLECTIVES.items():
        monkeypatch.setattr(dist, name, (lambda *_, **__: []) if name == broken else does)
    if broken is None:
        assert (backend.mesh(), backend.subgroup([0, 1]), backend.subgroup([0])) == (
            "mesh",
            "group",
            "group",
        )
        return
    with pytest.raises(RuntimeError, match=re.escape(f"the device's {COLLECTIVES[broken][1]}")):
        backend.mesh()
        backend.subgroup([0, 1])


# ---- random numbers of a device of its own -------------------------------------------------------------------------


class Device(types.ModuleType):
    """What torch asks of the module of a device that is not its own: random numbers of two devices."""

    def __init__(self):
        super().__init__("device")
        self.generators = [torch.Generator(), torch.Generator()]

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device):
        return self.generators[device.index or 0].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index or 0].set_state(state)


@pytest.fixture
def device(versions, monkeypatch):
    """A device type of torch that is no CPU, under the name that torch keeps for such."""
    module = Device()
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    monkeypatch.setattr(neuron, "DEVICE", "privateuseone")
    return module


def test_random_numbers_of_the_device_are_saved_and_put_back(device, tmp_path):
    backend = neuron.Neuron(BackendConfig())
    backend.seed(3)
    generator = device.generators[0]
    torch.rand(5, generator=generator)
    state = backend.rng_state()
    assert state.keys() == {"cpu", "privateuseone"}
    torch.save(state, tmp_path / "state.pt")
    wanted = torch.rand(4), torch.rand(4, generator=generator)
    backend.seed(4)
    backend.set_rng_state(load(tmp_path / "state.pt"))
    result = torch.rand(4), torch.rand(4, generator=generator)
    assert torch.equal(result[0], wanted[0]) and torch.equal(result[1], wanted[1])


def test_the_device_of_each_rank_draws_other_numbers(device):
    backend, drawn = neuron.Neuron(BackendConfig()), []
    for backend.world.rank in (0, 1):
        backend.seed(3)
        drawn += torch.rand(4, generator=device.generators[0]).tolist()
    assert len(set(drawn)) == 8


# ---- rejections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "has none; pip install"),
        ("2.9.0.2.15.32035+abc", "2.9.0.2.15.32035+abc"),
        ("1.0", "1.0"),
        ("2.15.0", "2.13 or 2.14"),
    ],
    ids=["none", "the XLA build", "the stub", "not seen yet"],
)
def test_what_is_not_native_pytorch_is_rejected(versions, version, said):
    versions.pop("torch-neuronx")
    versions.update({"torch-neuronx": version} if version else {})
    with pytest.raises(InputError, match="backend=neuron needs native PyTorch") as error:
        neuron.Neuron(BackendConfig())
    assert said in str(error.value)


def test_each_release_goes_with_its_torch(versions):
    versions["torch"] = "2.13.0"
    with pytest.raises(
        InputError, match=r"2.14.3.0.1 needs torch of the same release, and torch is 2.13.0; pip"
    ):
        neuron.Neuron(BackendConfig())


def without_devices(put):
    put.setattr(neuron_facts, "neuron_devices", list)


@pytest.mark.parametrize(
    ("settings", "change", "said"),
    [
        ({}, without_devices, "there is no /dev/neuron0"),
        ({"device": "cuda"}, None, "not backend.device=cuda"),
        ({"device": "cpu"}, None, "not backend.device=cpu"),
        ({"grad_compression": "bf16"}, None, "leave it out with backend=neuron"),
        (
            {"precision": "fp16"},
            None,
            "backend.precision=fp16 is not known; choose one of: auto, fp32, bf16",
        ),
        ({"precision": "tf32"}, None, "backend.precision=tf32 is not known"),
    ],
)
def test_what_cannot_run_there_is_rejected(versions, monkeypatch, settings, change, said):
    if change is not None:
        change(monkeypatch)
    with pytest.raises(InputError, match=said):
        neuron.Neuron(BackendConfig(**settings))


if __name__ == "__main__":
    sys.modules["torch_neuronx"] = pretend(setattr, {"torch": "2.14.0", "torch-neuronx": VERSION})
    sys.exit(program.main())


def test_tokens_are_counted_exactly_beyond_32_bits(
    versions, by_ddp, prepared, tmp_path, monkeypatch
):
    """The device computes whole numbers of 64 bits as 32."""
    start, enter, to_device, extremes = 2**31 + 1, Recorder.__enter__, DDP.to_device, []

    def enter_late(recorder):
        recorder.own_tokens += start
        return enter(recorder)

    def recorded(backend, batches):
        for batch in to_device(backend, batches):
            whole = [each for each in batch["inputs"].values() if each.dtype == torch.int64]
            extremes.extend(
                value for each in whole for value in (int(each.min()), int(each.max()))
            )
            yield batch

    monkeypatch.setattr(Recorder, "__enter__", enter_late)
    monkeypatch.setattr(DDP, "to_device", recorded)
    result = train(tmp_path / "run", prepared, *NEURON)
    wanted = [start + line["tokens"] for line in lines(by_ddp, "train")]
    assert [line["tokens"] for line in lines(result, "train")] == wanted
    assert extremes and min(extremes) >= -(2**31) and max(extremes) < 2**31
