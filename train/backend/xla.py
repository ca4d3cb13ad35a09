"""PyTorch/XLA: Trainium 1 through torch-neuronx 2.9 (not run on hardware), and the CPU, which is how it is tested.

A step is traced, compiled once and sent as a graph. Everything here serves three ends: few graphs (fixed shapes,
optimizer state and gradients that exist before the first step, no Python number that may become 0 or 1), no stop of the
device between steps (numbers are read back only when a line is due), and no silence (train/backend/guards.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend  # registers the process group "xla"
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from torch_xla.experimental.scan import _scan_impl_pytree
from torch_xla.utils.checkpoint import checkpoint

from train.backend import guards, nonfinite, rendezvous, zero1
from train.backend.graphs import GraphBudget, Graphs, Watched
from train.backend.hosts import RANK_STRIDE, Hosts
from train.backend.rounding import fp32_weights
from train.backend.shared_layer import scanned
from train.config import BackendConfig, XLAConfig, check

if TYPE_CHECKING:
    from train.backend import State
    from train.data.batches import Batch

ZERO1_BUCKET_MB = 130  # above 140 gave NaN, says optimum-neuron (accelerator.py)


class XLA(Hosts):
    """See `train.backend.Backend`."""

    name = "xla"
    pin_memory = False
    # AdamW's step count and rate stay on the device. Of Python numbers XLA makes 0 and 1 constants of the graph: bias
    # corrections become 1.0 after some hundred steps, 1 - lr * weight_decay near the end, and each is one more graph.
    adamw = {"capturable": True}

    def __init__(self, cfg: BackendConfig, *, collects: bool = False) -> None:
        super().__init__()
        self.cfg = cfg if isinstance(cfg, XLAConfig) else XLAConfig(**{**asdict(cfg), "name": "xla"})
        self.is_neuron = xr.device_type() == "NEURON"
        self.collects = collects  # only to find the graphs: every number that comes back is 0
        automatic = "bf16" if self.is_neuron else "fp32"
        self.precision = automatic if self.cfg.precision == "auto" else self.cfg.precision
        self.reduces_on_host = self.is_distributed and not self.is_neuron
        self._join()
        self.device = torch_xla.device()
        self.device_name = "NeuronCore" if self.is_neuron else "cpu through XLA"
        self.monitor_kind = "neuron" if self.is_neuron else "cpu"
        self._check_world()
        self.model: Any = None
        self.tied: guards.Tied = []
        self.micro, self.executed_before = 0, 0
        self.first_step_of: list[nn.Parameter] = []
        self.budget = GraphBudget(lambda: metric("CompileTime")[0], is_fatal=not self.is_neuron)

    def _join(self) -> None:
        """Meet the other ranks, before anything asks the device runtime: its first answer to "how many" stays."""
        timeout = timedelta(seconds=self.cfg.timeout_s or (7200 if self.is_neuron else 600))
        if self.reduces_on_host:  # on CPUs, XLA processes are each a world of their own: gloo joins them
            rendezvous.join("gloo", timeout.total_seconds())
        elif self.is_distributed:
            dist.init_process_group("xla", init_method="xla://", timeout=timeout)
            self.group = rendezvous.group_of_hosts(timeout)

    def _check_world(self) -> None:
        """That the way which gradients will take joins all ranks."""
        found, wanted = xm.xla_device_hw(self.device), "NEURON" if self.is_neuron else "CPU"
        check(found == wanted, f"PJRT_DEVICE={wanted}, but PyTorch/XLA opened {found}: see python -m train.doctor")
        if not self.is_distributed:
            return
        ones = torch.ones(1).to(self.device)
        self._add_up([ones])
        total = float(ones)  # read in any case: its graph is to be compiled as well
        guards.check_world(
            launched=self.world_size,
            device=dist.get_world_size() if self.reduces_on_host else xr.world_size(),
            group=dist.get_world_size(),
            ones=self.world_size if self.collects else total,
        )
        if not self.reduces_on_host and self.rank != xr.global_ordinal():
            raise RuntimeError(f"torchrun's rank {self.rank} is the device runtime's {xr.global_ordinal()}")

    def _add_up(self, tensors: list[Tensor]) -> None:
        """Sums over the ranks, in place. On CPUs by copies: XLA tensors handed to gloo themselves are not added."""
        if not self.reduces_on_host:
            xm.all_reduce(xm.REDUCE_SUM, tensors)
            return
        torch_xla.sync()
        copies = [tensor.flatten() for tensor in self.read(tensors)]
        together = torch.cat(copies)
        dist.all_reduce(together)
        for tensor, added in zip(tensors, together.split([copy.numel() for copy in copies]), strict=True):
            tensor.copy_(added.view(tensor.shape))

    # ---- the model -------------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, *, accumulation: int, lengths: int = 1) -> nn.Module:
        self.model, self.tied = model, guards.tied_names(model)
        if self.precision == "bf16_stochastic":
            model.to(torch.bfloat16)
        model.to(self.device)
        guards.tie(model, self.tied)
        guards.check_tied(model, self.tied)
        guards.watch_masks(model)
        self.skips = nonfinite.Skips(self.device)
        self._arrange_layers(model)
        training = 2 if self.reduces_on_host or accumulation > self.cfg.batches_per_execution else 1
        self.budget.limit = self.cfg.max_graphs or (training + 1) * lengths  # and one for evaluation
        return model

    def _arrange_layers(self, model: Any) -> None:
        is_looped = False
        if self.cfg.layers == "scan" or (self.cfg.layers == "auto" and not self.is_neuron):

            def make_loop(layer: nn.Module, depth: int) -> Any:
                return scanned(layer, depth, _scan_impl_pytree, device_type="xla")

            is_looped = model.loop_layers(make_loop)
            check(
                is_looped or self.cfg.layers == "auto",
                "backend.layers=scan needs a model that shares one layer and has no dropout (ALBERT v2); use unrolled",
            )
        if self.cfg.activation_checkpointing and not is_looped:  # the loop computes its layer again anyway
            model.recompute_layers(checkpoint)

    def own(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None
    ) -> torch.optim.Optimizer:
        guards.check_owned(optimizer, parameters)
        guards.check_tied(self.model, self.tied)
        smallest = guards.smallest(parameters)
        moments = [optimizer.state[parameter]["exp_avg"] for parameter in smallest]
        if self.cfg.zero1:
            optimizer = zero1.split_optimizer(
                optimizer,
                ZeroRedundancyOptimizer,
                max_norm=max_norm,
                bucket_mb=ZERO1_BUCKET_MB,
                world_size=self.world_size,
            )
        self._clear(parameters)
        self.settle()
        # A resumed run may have a rate too small to show in bf16 weights: only a new one has to change at once.
        self.first_step_of = [] if any(copy.any() for copy in self.read(moments)) else smallest
        return optimizer

    def settle(self) -> None:
        before, seed = self.budget.used, xm.get_rng_state()
        torch_xla.sync()
        xm.set_rng_state(seed)  # every cut moves it on; a resumed run goes on from the saved one
        self.budget.forgive(self.budget.used - before)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return super().optimizer_state(optimizer)
        shares = self.gather(xm._maybe_convert_to_cpu(zero1.own_share(optimizer)))
        whole = super().optimizer_state(optimizer.base_optimizer)  # for the order of the parameters
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {**whole, "state": zero1.whole_state(shares, parameters)} if shares else {}

    # ---- a step ----------------------------------------------------------------------------------------------------

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        if self.budget.base is None:
            self.executed_before = metric("ExecuteTime")[0]
        self.budget.start()
        source = Watched(batches, self.budget)
        device_loader = pl.MpDeviceLoader(
            source,
            self.device,
            loader_prefetch_size=self.cfg.loader_prefetch,
            device_prefetch_size=self.cfg.device_prefetch,
        )
        try:
            yield from device_loader
            source.raise_failure()
            self.budget.check()
        finally:
            device_loader._parallel_loader.close()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        if self.precision != "bf16_master":
            with torch.autocast("xla", torch.bfloat16, enabled=self.precision == "bf16"):
                yield
            return
        rounded = {name: weight.bfloat16() for name, weight in self.model.named_parameters()}
        with _reparametrize_module(self.model, rounded, tie_weights=True):
            yield

    @contextmanager
    def accumulate(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        yield
        self.micro = 0 if is_last else self.micro + 1
        if not is_last and self.micro % self.cfg.batches_per_execution == 0:
            torch_xla.sync()

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        watched, self.first_step_of = self.first_step_of, []
        before = self.read(watched)
        norm = self._update(optimizer, parameters, max_norm)
        self.skips.see(norm)
        self._clear(parameters)
        torch_xla.sync()
        if watched and not self.collects:
            if nonfinite.is_finite(self.read([norm])[0]):
                guards.check_changed(before, self.read(watched), step="the first step")
            else:  # skipped: the next one is the first
                self.first_step_of = watched
        self.budget.check()
        return norm

    def _update(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None
    ) -> Tensor:
        """Reduce, then clip, then step; then undo that unless the norm is finite, in the same graph."""
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            held = nonfinite.changed_by(optimizer, optimizer.base_optimizer)
            before = nonfinite.copies(held)
            optimizer.step()  # reduces and clips as well
            norm: Tensor = optimizer.grad_norm  # of all ranks' shares
        else:
            self._reduce(optimizer, parameters)
            held = nonfinite.changed_by(optimizer)
            before = nonfinite.copies(held)
            with fp32_weights(parameters if self.precision == "bf16_stochastic" else []):
                norm = nn.utils.clip_grad_norm_(parameters, max_norm if max_norm is not None else float("inf"))
                optimizer.step()
        nonfinite.undo_unless(nonfinite.is_finite(norm), held, before)
        return norm

    def _reduce(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        if not self.reduces_on_host:
            xm.reduce_gradients(optimizer)
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._add_up(grads)
        torch._foreach_div_(grads, float(self.world_size))

    def _clear(self, parameters: list[nn.Parameter]) -> None:
        """Zero gradients that stay: without them the first backward pass of a step would be another graph."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies: list[Tensor] = xm._maybe_convert_to_cpu([tensor.detach() for tensor in tensors])
        return copies

    def graphs(self) -> Graphs:
        return Graphs(self.budget.used, metric("CompileTime")[1] / 1e9, metric("ExecuteTime")[0] - self.executed_before)

    # ---- random numbers and files ----------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed + RANK_STRIDE * (self.rank + 1))
        xm.set_rng_state(seed + RANK_STRIDE * (self.rank + 1))  # else every process draws from the constant 101
        states = self.gather({"state": xm.get_rng_state()})
        guards.check_distinct_seeds([state["state"] for state in states])

    def rng_state(self) -> State:
        return {"cpu": torch.get_rng_state(), "xla": xm.get_rng_state()}

    def set_rng_state(self, state: State) -> None:
        torch.set_rng_state(state["cpu"])
        if "xla" in state:
            xm.set_rng_state(state["xla"])

    def save(self, state: State, file: BinaryIO) -> None:
        # Rank 0 alone is here, in a thread beside the training: the state is on the host, so that no graph is cut.
        xm.save(state, file, global_master=True)

    def close(self) -> None:
        self.model = None
        xm.wait_device_ops()
        super().close()


def metric(name: str) -> tuple[int, float]:
    """How often something was done in this process, and the nanoseconds it took."""
    found = metrics.metric_data(name)
    return (0, 0.0) if found is None else (found[0], found[1])
