"""PyTorch/XLA on Trainium 1 (torch-neuronx 2.9, not run on hardware) and on CPUs, where the code is tested.

A step is traced, compiled once, and sent to the device as a graph. Few graphs are needed, because shapes are fixed,
optimizer state and gradients exist before the first step, and no Python number in a graph becomes 0 or 1. The device
does not wait between steps, because numbers are read back only for lines of metrics. train/parallel/guards.py has
checks for failures that would otherwise be silent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla._internal.rendezvous as xla_rendezvous
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend  # registers the process group "xla"
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch_xla.utils.checkpoint import checkpoint

from train.config import BackendConfig, XLAConfig, check
from train.config.backend import DEFAULT_TIMEOUT_S, JOIN_TIMEOUT_S, NEURON_TIMEOUT_S
from train.machine.launched import launched
from train.parallel import guards, nonfinite, rendezvous
from train.parallel.backend import (
    RANK_STRIDE,
    Backend,
    State,
    all_reduce_flat,
    round_to_bf16,
    widen,
)
from train.parallel.grad_sync import GradSync, gradients_of
from train.parallel.graphs import GraphBudget, Graphs
from train.parallel.precision import check_precision
from train.parallel.xla_environment import COLLECTS

if TYPE_CHECKING:
    from train.data.batches.loader import Batch

logger = logging.getLogger("train")
BUCKET_MB = 50  # torch_xla's value on Neuron, unless ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB is set
HOST_PREFETCH, DEVICE_PREFETCH = 8, 4  # micro batches kept ready on the host, and on the device
HINT = (  # how to find the cause of an extra graph
    "look for an input that changed its shape, a Python number that becomes 0 or 1, or control flow that depends on "
    "values (PT_XLA_DEBUG_LEVEL=2 prints the line)"
)


class XLA(Backend):
    """A device of PyTorch/XLA, whose steps are graphs."""

    name = "xla"
    pin_memory = False
    # AdamW's step count and learning rate are on the device. XLA compiles the Python numbers 0 and 1 into a graph as
    # constants. The bias corrections become 1.0 after a few hundred steps, and 1 - lr * weight_decay near the end: each
    # time, another graph would be needed.
    adamw = {"capturable": True}

    def __init__(self, cfg: BackendConfig) -> None:
        super().__init__()
        if not isinstance(cfg, XLAConfig):
            cfg = XLAConfig(**{**asdict(cfg), "name": "xla"})
        self.cfg = cfg
        self.is_neuron = xr.device_type() == "NEURON"
        self.collects = os.environ.get(COLLECTS) == "1"
        self.device_name = "cpu through XLA"
        self.monitor_kind = "cpu"
        self.precision = cfg.precision
        automatic = "fp32"
        if self.is_neuron:
            self.device_name = "NeuronCore"
            self.monitor_kind = "neuron"
            automatic = "bf16"
        if cfg.precision == "auto":
            self.precision = automatic
        self.reduces_on_host = self.world.is_distributed and not self.is_neuron
        self._join()
        self.device = torch_xla.device()
        self.check_world()
        self.model: Any = None
        self.tied: guards.Tied = []
        self.executed_before = 0
        self.untimed = 0  # number of graphs from the runtime's cache, which have no compile time
        self.first_step_of: list[nn.Parameter] = []
        self.budget = GraphBudget(
            lambda: metric("CompileTime")[0], is_fatal=not self.is_neuron, hint=HINT
        )

    def _join(self) -> None:
        """Join the other ranks. Call this first, because the device runtime caches the first rank count it sees."""
        if not self.world.is_distributed:
            return
        usual_s = NEURON_TIMEOUT_S if self.is_neuron else DEFAULT_TIMEOUT_S
        timeout_s = self.cfg.timeout_s or usual_s
        if self.reduces_on_host:
            # On CPUs each XLA process is a world of one rank, so gloo joins them.
            rendezvous.join("gloo", timeout_s=timeout_s)
        else:
            # PyTorch/XLA would name its store after this machine's restart count, which can differ between machines.
            xla_rendezvous._store = rendezvous.await_ranks(launched(), JOIN_TIMEOUT_S)
            joining = timedelta(seconds=JOIN_TIMEOUT_S)
            dist.init_process_group("xla", init_method="xla://", timeout=joining)
            self.world.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def is_compiling(self) -> bool:
        return num_begun() - metric("CompileTime")[0] > self.untimed

    def check_world(self) -> None:
        """Check that the expected device was opened, and that the reduction of gradients reaches all ranks."""
        opened = xm.xla_device_hw(self.device)
        wanted = "NEURON" if self.is_neuron else "CPU"
        check(
            opened == wanted,
            f"PJRT_DEVICE={wanted}, but PyTorch/XLA opened {opened}: see baretrain doctor",
        )
        if not self.world.is_distributed:
            return
        ones = torch.ones(1).to(self.device)
        self.all_reduce([ones])
        # always read, because neuron_parallel_compile must compile this graph, too
        total = float(ones)
        if self.collects:
            total = self.world.size
        guards.check_world(
            launched=self.world.size,
            device=dist.get_world_size() if self.reduces_on_host else xr.world_size(),
            group=dist.get_world_size(),
            ones=total,
        )
        if not self.reduces_on_host and self.world.rank != xr.global_ordinal():
            raise RuntimeError(
                f"torchrun's rank {self.world.rank} is rank {xr.global_ordinal()} of the device runtime"
            )
        rendezvous.check_alike(self.world, f"xla on {opened}, {self.precision}")

    def all_reduce(self, tensors: list[Tensor]) -> None:
        if not self.reduces_on_host:
            bucket_mb = int(os.environ.get("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB") or BUCKET_MB)
            xm.all_reduce_bucketized_gradients(tensors, 1.0, None, True, bucket_cap_mb=bucket_mb)
            return
        torch_xla.sync()
        # gloo cannot reduce XLA tensors, so it reduces copies on the host.
        for tensor, total in zip(tensors, all_reduce_flat(self.to_host(tensors)), strict=True):
            tensor.copy_(total)

    # ---- the model -------------------------------------------------------------------------------------------------

    def setup_model(self, model: Any, *, accumulation: int = 1, lengths: int = 1) -> None:
        check_precision(model, self.precision)
        training = 1
        if self.reduces_on_host or accumulation > self.cfg.batches_per_execution:
            training = 2
        self.budget.limit = (training + 1) * lengths  # training graphs, and one for evaluation
        self.model = model
        self.tied = guards.tied_names(model)
        if self.precision == "bf16_stochastic":
            model.to(torch.bfloat16)
        model.to(self.device)
        guards.tie(model, self.tied)
        guards.check_tied(model, self.tied)
        guards.watch_masks(model)
        self.skips = nonfinite.Skips(self.device, self.to_host)
        if self.cfg.activation_checkpointing:
            model.recompute_layers(checkpoint)

    def grad_sync(self, model: nn.Module, *, accumulation: int) -> GradSync:
        return XLASync(self, model)

    def ready(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        guards.check_owned(optimizer, parameters)
        guards.check_tied(self.model, self.tied)
        smallest = guards.smallest(parameters)
        moments: list[Tensor] = []
        for parameter in smallest:
            state = optimizer.state[parameter]
            moments += [value for value in state.values() if value.ndim]
        self._clear(parameters)
        self.mark_step()
        # Only a new run must change weights in its first step. A resumed run's learning rate may be too small in bf16.
        is_new = not any(copy.any() for copy in self.to_host(moments))
        self.first_step_of = smallest if is_new else []

    def mark_step(self) -> None:
        before = self.budget.used
        seed = xm.get_rng_state()
        torch_xla.sync()
        # Every sync advances the seed, but a resumed run starts from the saved one.
        xm.set_rng_state(seed)
        self.budget.forgive(self.budget.used - before)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def to_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        if self.budget.base is None:
            self.executed_before = metric("ExecuteTime")[0]
        self.budget.start()
        failures: list[Exception] = []

        def source() -> Iterator[Batch]:
            try:
                yield from batches
            except Exception as error:
                # torch_xla's loader thread would treat it as the end of the data.
                failures.append(error)

        loader = pl.ParallelLoader(
            source(),
            [self.device],
            loader_prefetch_size=HOST_PREFETCH,
            device_prefetch_size=DEVICE_PREFETCH,
        )
        try:
            seed = xm.get_rng_state()
            for batch in loader.per_device_loader(self.device):
                # The loader may end a graph, which advances the seed. Dropout must not depend on when it does.
                xm.set_rng_state(seed)
                yield batch
                seed = xm.get_rng_state()
            xm.set_rng_state(seed)
            if failures:
                raise failures[0]
            self.budget.check()
        finally:
            loader.close()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        if self.precision != "bf16_master":
            with torch.autocast("xla", torch.bfloat16, enabled=self.precision == "bf16"):
                yield
            return
        rounded = {name: weight.bfloat16() for name, weight in self.model.named_parameters()}
        with _reparametrize_module(self.model, rounded, tie_weights=True):
            yield

    def unscale(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self.first_weights = self.to_host(self.first_step_of)
        # Before `widen` changes dtypes.
        changed = nonfinite.changed_by(optimizer)
        self.before_step = nonfinite.copies(changed)
        if self.precision == "bf16_stochastic":
            widen(parameters)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor
    ) -> None:
        optimizer.step()
        if self.precision == "bf16_stochastic":
            round_to_bf16(parameters)
        nonfinite.undo_unless(
            nonfinite.is_finite(norm), nonfinite.changed_by(optimizer), self.before_step
        )
        self.skips.see(norm)
        self._clear(parameters)
        torch_xla.sync()  # run the whole step as one graph
        self.before_step = []
        if self.first_step_of and not self.collects:
            self._check_first_step(norm)
        self.first_weights = []
        self.untimed = num_begun() - metric("CompileTime")[0]
        self.budget.check()

    def _check_first_step(self, norm: Tensor) -> None:
        if not nonfinite.is_finite(self.to_host([norm])[0]):
            return  # the step was skipped, so the next one is checked instead
        watched = self.first_step_of
        self.first_step_of = []
        guards.check_changed(self.first_weights, self.to_host(watched), step="the first step")

    def _clear(self, parameters: list[nn.Parameter]) -> None:
        """Set gradients to zero instead of freeing them: a backward pass that creates them would be another graph."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies: list[Tensor] = xm._maybe_convert_to_cpu([tensor.detach() for tensor in tensors])
        return copies

    def graphs(self) -> Graphs:
        return Graphs(
            self.budget.used,
            metric("CompileTime")[1] / 1e9,
            metric("ExecuteTime")[0] - self.executed_before,
        )

    # ---- random numbers and files ----------------------------------------------------------------------------------

    def profile_text(self) -> str:
        return f"\nPyTorch/XLA since the start:\n\n{metrics.short_metrics_report()}\n"

    def seed(self, seed: int) -> None:
        own = seed + RANK_STRIDE * (self.world.rank + 1)
        torch.manual_seed(own)
        xm.set_rng_state(own)  # otherwise the seed is 101 in every process
        guards.check_distinct_seeds(self.world.gather(xm.get_rng_state()))

    def rng_state(self) -> State:
        return {"cpu": torch.get_rng_state(), "xla": xm.get_rng_state()}

    def set_rng_state(self, state: State) -> None:
        torch.set_rng_state(state["cpu"])
        if "xla" in state:
            xm.set_rng_state(state["xla"])

    def close(self) -> None:
        self.model = None
        xm.wait_device_ops()
        super().close()


class XLASync(GradSync):
    """A reduction that sums gradients and label counts together, after the last backward pass has been traced."""

    def __init__(self, backend: XLA, model: nn.Module) -> None:
        super().__init__(model, backend.device)
        self.backend = backend
        self.per_execution = backend.cfg.batches_per_execution
        self.micro = 0

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        yield
        if is_last:
            self.micro = 0
            return
        self.micro += 1
        if self.micro % self.per_execution == 0:
            torch_xla.sync()

    def reduce(self) -> Tensor:
        if self.backend.world.size > 1:
            gradients = gradients_of(self.module.parameters())
            # The last layers' gradients are ready first.
            self.backend.all_reduce([self.count, *reversed(gradients)])
        return self.count


def metric(name: str) -> tuple[int, float]:
    """Return the count of one of PyTorch/XLA's metrics in this process, and its total in nanoseconds."""
    data = metrics.metric_data(name)
    if data is None:
        return 0, 0.0
    return data[0], data[1]


def num_begun() -> int:
    """Return the number of graphs that this process has begun to compile or to look up in the runtime's cache."""
    return metrics.counter_value("UncachedCompile") or 0
