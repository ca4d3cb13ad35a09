"""Steps are recorded by PyTorch's own code, on a CUDA runtime whose kernels do nothing: `fake_cuda`.

Functions that are not tests run in a process of their own, with that runtime.
"""

import logging
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_cuda import GIB, LAUNCHED, counts
from finetuning import tuned, two_lengths
from forks import free_port
from running import lines, train_here
from transformers import AutoConfig, AutoModelForSequenceClassification

from train.checkpoints.staging import Staging, num_bytes_of
from train.config import BackendConfig, DataParallelConfig, OptimConfig
from train.models.heads import PaddedEncoder, logits_of
from train.parallel import captured
from train.parallel.ddp import DDP
from train.parallel.engines import build_engine
from train.parallel.lamb_update import Lamb
from train.parallel.proof import Proof
from train.storage.model_folder import ENCODERS
from train.tasks.finetune import TextTask

# steps with a shape before the proof of its graph, which replays it once
FIRST = captured.FIRST_CALLS
GRAPHS = "backend.cuda_graphs"
NARROW = int(2.44 * GIB)
UNSPLIT = "max_split_size_mb:200"  # so that no small tensor keeps a large block


def log(folder):
    return (Path(folder) / "log" / "rank_0000.txt").read_text()


def trains(folder, prepared, *settings):
    reason, step = train_here(Path(folder), Path(prepared), "backend=ddp", *settings)
    return {"reason": reason, "step": step}


def fails(patch, *words):
    """Train two lengths of text after `patch`, a function of a batch's length that is called in each loss."""
    folder, tokenizer, *settings = words
    loss = TextTask.loss

    def patched(self, model, inputs):
        patch(inputs["input_ids"].shape[1])
        return loss(self, model, inputs)

    TextTask.loss = patched
    settings = [*two_lengths(Path(folder)), "max_steps=40", *settings]
    tuned(Path(folder) / "run", Path(tokenizer), *settings)
    torch.cuda.empty_cache()  # fails while a recording holds memory
    return {"reserved": torch.cuda.memory_reserved()}


# ---- what is recorded ------------------------------------------------------------------------------------------------


def test_a_run_with_evaluations_and_checkpoints_replays_its_steps(fake_cuda, prepared, tmp_path):
    run = fake_cuda(trains, tmp_path / "run", prepared, "max_steps=10")
    assert (run["reason"], run["step"], run["errors"]) == ("done", 10, 0)
    assert (run["captures"], run["ended"], run["host_copies"]) == (1, 1, 0)
    assert run["replays"] == 10 - FIRST
    equal = "1 graph recorded; replays equal plain steps (loss 0e+00, norm 0e+00, weights 0e+00"
    assert log(tmp_path / "run").count(f"{GRAPHS}: {equal}") == 1
    (summary,) = lines(tmp_path / "run", "summary")
    assert summary["peak_device_bytes"] == run["peak"]  # with what no tensor has


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "graphs", "replays"), [(8, 1, 5), (4, 2, 18)])
def test_one_rank_under_torchrun_records(fake_cuda, prepared, tmp_path, micro, graphs, replays):
    settings = ["max_steps=8", f"micro_batch_size={micro}"]
    launched = LAUNCHED | {"MASTER_PORT": str(free_port())}
    run = fake_cuda(trains, tmp_path / "run", prepared, *settings, **launched)
    assert (run["reason"], run["errors"], run["ended"]) == ("done", 0, graphs)
    assert run["replays"] == replays


@pytest.mark.slow
def test_steps_are_recorded_in_memory_that_grows(fake_cuda, prepared, tmp_path):
    """As `baretrain launch` sets it."""
    memory = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    run = fake_cuda(trains, tmp_path / "run", prepared, "max_steps=8", **memory)
    assert (run["reason"], run["errors"], run["ended"]) == ("done", 0, 1)
    assert run["replays"] == 8 - FIRST


def learns_by_lamb(*words):
    """Return how often LAMB's fused update is called, and how often in a recording."""
    change, calls = Lamb.change_fused, []

    def counted(self, group, own):
        calls.append(torch.cuda.is_current_stream_capturing())
        change(self, group, own)

    Lamb.change_fused = counted
    return {**trains(*words), "calls": len(calls), "recorded": sum(calls)}


@pytest.mark.slow
def test_the_fused_update_of_lamb_is_recorded(fake_cuda, prepared, tmp_path):
    run = fake_cuda(learns_by_lamb, tmp_path / "run", prepared, "optim=lamb", "max_steps=8")
    assert (run["reason"], run["errors"], run["ended"]) == ("done", 0, 1)
    assert run["replays"] == 8 - FIRST and run["host_copies"] == 0
    # weights with decay and without; the proof runs the step before and in the recording
    assert run["recorded"] == 2 and run["calls"] == 2 * (FIRST + 2)
    assert "replays equal plain steps" in log(tmp_path / "run")


def chooses_kernels(*words):
    """Return whether each recording has deterministic kernels only."""
    record, chosen = captured.Graphs.record, []

    def seeing(self, function, inputs):
        chosen.append(torch.are_deterministic_algorithms_enabled())
        return record(self, function, inputs)

    captured.Graphs.record = seeing
    return {**trains(*words), "chosen": chosen}


@pytest.mark.slow
def test_recordings_have_deterministic_kernels_if_asked(fake_cuda, prepared, tmp_path):
    settings = ["max_steps=8", "backend.deterministic=true"]
    run = fake_cuda(chooses_kernels, tmp_path / "run", prepared, *settings)
    assert (run["reason"], run["errors"], run["ended"]) == ("done", 0, 1)
    assert run["replays"] == 8 - FIRST and run["chosen"] == [True]


# ---- what is not recorded --------------------------------------------------------------------------------------------


def waits_for_long_texts(*words):
    return fails(lambda length: length > 16 and torch.ones(1, device="cuda").item(), *words)


def test_a_shape_that_waits_leaves_the_others_their_graphs(fake_cuda, tokenizer_folder, tmp_path):
    run = fake_cuda(waits_for_long_texts, tmp_path, tokenizer_folder, "global_batch_size=1")
    text = log(tmp_path / "run")
    assert f"{GRAPHS}: the step [1, 32] runs without a CUDA graph: it waits for the GPU at" in text
    assert "test_fake_cuda.py" in text and "the step [1, 16]" not in text
    assert run["ended"] >= 1 and run["replays"] > run["ended"] and run["errors"] == 0


def waits_in_recordings(*words):
    """A path that the steps before a recording do not take, with the memory of a whole step."""

    def wait(length):
        held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        if length > 16 and torch.cuda.is_current_stream_capturing():
            held[0].item()

    return fails(wait, *words)


def test_a_recording_that_fails_gives_its_memory_back(fake_cuda, tokenizer_folder, tmp_path):
    words = [tmp_path, tokenizer_folder, "global_batch_size=1"]
    run = fake_cuda(waits_in_recordings, *words, PYTORCH_CUDA_ALLOC_CONF=UNSPLIT)
    text = log(tmp_path / "run")
    reason = "the step [1, 32] runs without a CUDA graph: an operation cannot be recorded"
    assert (
        f"{reason} (AcceleratorError: CUDA error: operation not permitted when stream is" in text
    )
    assert run["captures"] > run["ended"] >= 1 and run["errors"] > 0
    assert run["replays"] > run["ended"]  # the other length has its graph
    assert run["reserved"] < GIB / 2  # with those of failed recordings, several


# ---- memory ----------------------------------------------------------------------------------------------------------


def needs_memory(*words):
    def take(length):
        torch.empty(GIB + (length > 16) * GIB // 4, dtype=torch.uint8, device="cuda")

    return fails(take, *words)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_that_fits_without_graphs_ends_well(fake_cuda, tokenizer_folder, tmp_path, batch):
    """The graph of short texts keeps 1 GiB, and long texts need 1.25."""
    words = [needs_memory, tmp_path, tokenizer_folder, f"global_batch_size={batch}"]
    device = {
        "FAKE_CUDA_BYTES": str(2 * GIB),
        "PYTORCH_CUDA_ALLOC_CONF": UNSPLIT,
    }
    run = fake_cuda(*words, "micro_batch_size=1", **device)
    text = log(tmp_path / "run")
    assert f"{GRAPHS}: the device ran out of memory; steps run without CUDA graphs" in text
    assert run["ended"] >= 1 and run["reserved"] < GIB
    assert "step 40/40" in text


def proves(*words):
    """Return where proofs copied the state to, and the bytes on the device that they have left behind."""
    begin, add = Proof.begin, captured.Graphs.add
    places, left = [], []

    def begun(self):
        before = begin(self)
        places.append(sorted({copy.device.type for copy in before.copies}))
        return before

    def added(self, key, function, inputs):
        before = torch.cuda.memory_allocated()
        add(self, key, function, inputs)
        left.append(torch.cuda.memory_allocated() - before)

    Proof.begin, captured.Graphs.add = begun, added
    run = fails(lambda _: torch.empty(GIB, dtype=torch.uint8, device="cuda"), *words)
    return {**run, "places": places, "left": left}


# copies of weights and moments take 147 MB
WIDE = ["model.hidden_size=1024", "model.intermediate_size=4096"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_bytes", "place"), [(80 * GIB, "cuda"), (NARROW, "cpu")])
def test_proofs_copy_the_state_on_the_device_if_it_has_ample_memory(
    fake_cuda, tokenizer_folder, tmp_path, num_bytes, place
):
    """The narrow device has the memory of a plain step beside a graph, but not of copies beside both."""
    words = [tmp_path, tokenizer_folder, "global_batch_size=1", *WIDE]
    device = {"FAKE_CUDA_BYTES": str(num_bytes), "PYTORCH_CUDA_ALLOC_CONF": UNSPLIT}
    run = fake_cuda(proves, *words, **device)
    text = log(tmp_path / "run")
    assert run["places"] == [[place]] * run["ended"] and run["ended"] >= 2
    assert "runs without" not in text and "out of memory" not in text
    # the first one leaves what cuBLAS works with in recordings
    assert run["left"][-1] < 2**20
    # graphs keep 1 GiB, while a plain step of another shape takes as much
    (summary,) = lines(tmp_path / "run", "summary")
    assert summary["peak_device_bytes"] == run["peak"] > 2 * GIB


def saves_a_state(folder):
    """Sizes that PyTorch would round up to twice as much."""
    state = {str(n): torch.zeros(2**20 + n, device="cuda") for n in range(1, 6)}
    state["bf16"] = torch.ones(3, dtype=torch.bfloat16, device="cuda")
    before = counts()["page_locked"]
    staging = Staging()
    staging.copy(state, DDP(BackendConfig(precision="fp32")))
    locked = counts()["page_locked"] - before
    return {"locked": locked, "needed": num_bytes_of(state)}


def test_a_save_locks_as_much_memory_as_the_state_has(fake_cuda, tmp_path):
    run = fake_cuda(saves_a_state, tmp_path)
    assert run["needed"] <= run["locked"] < 1.01 * run["needed"]


# ---- architectures ---------------------------------------------------------------------------------------------------

# In transformers, these read numbers of each batch, so no step of theirs is recorded.
WAITING = ("flaubert", "ibert", "longformer", "xlm")
KINDS = [kind for kind in ENCODERS.split() if kind not in WAITING]
SIZES = {
    "vocab_size": 100,
    "num_labels": 3,
    "pad_token_id": 0,
    "block_size": 8,
    "attention_window": 8,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 16,
    "intra_bottleneck_size": 32,
    **dict.fromkeys(("hidden_size", "dim", "d_model", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_inner"), 128),
}


def small(kind):
    """A small model of an architecture, from sizes that its configuration has."""
    own = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SIZES.items() if hasattr(own, name)}
    if kind.startswith("deberta"):
        sizes["relative_attention"] = True
    if kind == "big_bird":
        sizes["attention_type"] = "original_full"
    config = AutoConfig.for_model(kind, **sizes)
    return PaddedEncoder(AutoModelForSequenceClassification.from_config(config))


def waves(size, device):
    """The cosines and sines of a Fourier transform."""
    places = torch.arange(size, device=device)
    angles = torch.outer(places, places) * (2 * math.pi / size)
    return angles.cos(), angles.sin()


def by_products(states, *, dim):
    """The real part of FNet's transform, for which PyTorch needs cuFFT, which does not run on this device."""
    assert states.dtype == torch.float32 and dim == (1, 2)  # cuFFT has no bf16
    lengths, widths = (waves(size, states.device) for size in states.shape[1:])
    return lengths[0] @ states @ widths[0] - lengths[1] @ states @ widths[1]


def test_products_are_the_transform_of_fnet():
    states = torch.randn(2, 6, 8)
    wanted = torch.fft.fftn(states, dim=(1, 2)).real
    # sums of 48 numbers, added in another order
    torch.testing.assert_close(by_products(states, dim=(1, 2)), wanted, atol=1e-4, rtol=1e-4)


def loss_of(model, inputs):
    logits = logits_of(model, inputs).float()
    return torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum")


def steps_of(model, precision, *, is_masked):
    """Train a model for some steps. Returns how many graphs there are."""
    backend = DDP(BackendConfig(precision=precision))
    engine = build_engine(
        DataParallelConfig(), OptimConfig(), backend, model, loss_of, accumulation=1
    )
    ids = partial(torch.zeros, 4, 32, dtype=torch.long, device="cuda")
    inputs = {"input_ids": ids(), "token_type_ids": ids()}
    inputs["labels"] = torch.zeros(4, dtype=torch.long, device="cuda")
    if is_masked:
        inputs["attention_mask"] = ids() + 1
    for _ in range(FIRST + 2):
        engine.begin_step(4.0, 1e-3)
        engine.forward_backward({"inputs": inputs}, is_last=True)
        engine.optimizer_step(engine.reduce_and_clip())
    return len(engine.graphs.recorded)


def architectures(folder):
    logging.basicConfig(filename=Path(folder) / "log", format="%(message)s", level="INFO")
    torch.backends.cudnn.enabled = False  # it asks the driver for more than there is
    torch.fft.fftn = by_products
    recorded = {}
    for kind in KINDS:
        precision = "fp32" if kind == "deberta" else "bf16"
        for is_masked in (False, True):
            found = steps_of(small(kind), precision, is_masked=is_masked)
            recorded[f"{kind} {is_masked}"] = found
    return {"recorded": recorded}


@pytest.mark.slow
def test_architectures_are_recorded_with_masks_and_without(fake_cuda, tmp_path):
    run = fake_cuda(architectures, tmp_path)
    kinds = [(kind, is_masked) for kind in KINDS for is_masked in (False, True)]
    assert run["recorded"] == {f"{kind} {is_masked}": 1 for kind, is_masked in kinds}
    assert run["errors"] == run["host_copies"] == 0
    assert "runs without a CUDA graph" not in (tmp_path / "log").read_text()


def waits_by_architecture(folder):
    """Numbers mean nothing here, and I-BERT ends a run whose numbers it rejects: the answer is yes, after the wait."""
    answer = torch.Tensor.__bool__
    for kind in WAITING:
        log = Path(folder) / kind
        logging.basicConfig(filename=log, format="%(message)s", level="INFO", force=True)
        if kind == "ibert":
            torch.Tensor.__bool__ = lambda tensor: answer(tensor) or True
        for is_masked in (False, True):
            assert steps_of(small(kind), "bf16", is_masked=is_masked) == 0
    return {}


@pytest.mark.slow
def test_architectures_that_read_numbers_say_why_they_are_not_recorded(fake_cuda, tmp_path):
    run = fake_cuda(waits_by_architecture, tmp_path)
    assert run["captures"] == run["errors"] == 0
    for kind in WAITING:
        place = "test_fake_cuda.py" if kind == "ibert" else f"modeling_{kind}.py"
        text = (tmp_path / kind).read_text()
        said = [line for line in text.splitlines() if line.startswith(GRAPHS)]
        assert len(said) == 2  # with a mask and without
        for line in said:
            start = (
                f"{GRAPHS}: the step [4, 32] runs without a CUDA graph: it waits for the GPU at"
            )
            assert line.startswith(start) and place in line
