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
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from train.backend import guards, zero1
from train.backend.graphs import GraphBudget, Watched
from train.backend.hosts import RANK_STRIDE, Hosts
from train.backend.shared_layer import scanned
from train.config import BackendConfig, XLAConfig, check

if TYPE_CHECKING:
    from train.backend import State
    from train.data.batches import Batch

NUM_WATCHED = 8  # weights that are looked at before and after the first step


class XLA(Hosts):
    """See `train.backend.Backend`."""

    name = "xla"
    pin_memory = False
    # AdamW's step count stays on the device: as Python numbers its bias corrections reach 1.0 after some hundred steps,
    # which XLA makes a constant of the graph, and that is one more graph in the middle of the run.
    adamw = {"capturable": True}

    def __init__(self, cfg: BackendConfig, *, collects: bool = False) -> None:
        super().__init__()
        self.cfg = cfg if isinstance(cfg, XLAConfig) else XLAConfig(**{**asdict(cfg), "name": "xla"})
        self.is_neuron = xr.device_type() == "NEURON"
        self.collects = collects  # only to find the graphs: every number that comes back is 0
        check(
            self.cfg.grad_compression == "none", "backend.grad_compression is for NCCL; leave it out with backend=xla"
        )
        check(
            not self.cfg.zero1 or self.is_neuron or self.world_size == 1,
            "backend.zero1 on several ranks needs Trainium: CPU processes have no collectives between their devices",
        )
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
        self.micro, self.steps = 0, 0
        self.budget = GraphBudget(lambda: compilations()[0], is_fatal=not self.is_neuron)

    def _join(self) -> None:
        """Meet the other ranks, before anything asks the device runtime: its first answer to "how many" stays."""
        timeout = timedelta(seconds=self.cfg.timeout_s)
        if self.reduces_on_host:  # on CPUs, XLA processes are each a world of their own: gloo joins them
            dist.init_process_group("gloo", timeout=timeout)
        elif self.is_distributed:
            dist.init_process_group("xla", init_method="xla://", timeout=timeout)
            self.group = dist.new_group(backend="gloo", timeout=timeout)

    def _check_world(self) -> None:
        """That the way which gradients will take joins all ranks."""
        found, wanted = xm.xla_device_hw(self.device), "NEURON" if self.is_neuron else "CPU"
        check(found == wanted, f"PJRT_DEVICE={wanted}, but PyTorch/XLA opened {found}: see python -m train.doctor")
        if not self.is_distributed:
            return
        ones = torch.ones(1).to(self.device)
        self._add_up([ones])
        guards.check_world(
            launched=self.world_size,
            device=dist.get_world_size() if self.reduces_on_host else xr.world_size(),
            group=dist.get_world_size(),
            ones=self.world_size if self.collects else float(ones),
        )

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

    def wrap(self, model: nn.Module, *, accumulation: int) -> nn.Module:
        per_graph = self.cfg.batches_per_execution
        check(
            accumulation % per_graph == 0,
            f"backend.batches_per_execution={per_graph} does not divide the {accumulation} micro batches of a step",
        )
        self.model, self.tied = model, guards.tied_names(model)
        if self.precision == "bf16_stochastic":
            model.to(torch.bfloat16)
        model.to(self.device)
        guards.tie(model, self.tied)
        guards.check_tied(model, self.tied)
        guards.watch_masks(model)
        self._arrange_layers(model)
        training = 2 if self.reduces_on_host or accumulation > per_graph else 1
        self.budget.limit = self.cfg.max_graphs or training + 1  # and one for evaluation
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
        if self.cfg.zero1:
            check(
                isinstance(optimizer, torch.optim.AdamW), "backend.zero1 splits tensors, which LAMB's norms cannot be"
            )
            optimizer = zero1.split_optimizer(optimizer, ZeroRedundancyOptimizer, max_norm=max_norm)
        self._clear(parameters)
        seed = xm.get_rng_state()  # every cut moves it on; a resumed run goes on from the saved one
        torch_xla.sync()
        xm.set_rng_state(seed)
        return optimizer

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return super().optimizer_state(optimizer)
        shares = self.gather(xm._maybe_convert_to_cpu(zero1.own_share(optimizer)))
        settings = torch.optim.Optimizer.state_dict(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {**settings, "state": zero1.whole_state(shares, parameters)} if shares else {}

    # ---- a step ----------------------------------------------------------------------------------------------------

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
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
        smallest = sorted(parameters, key=lambda parameter: parameter.numel())[:NUM_WATCHED]
        before = [] if self.steps else self.read(smallest)
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.step()  # reduces and clips as well
            norm = optimizer.grad_norm
        else:
            norm = self._update(optimizer, parameters, max_norm)
        self._clear(parameters)
        torch_xla.sync()
        if self.steps == 0 and not self.collects:
            guards.check_changed(before, self.read(smallest), step="the first step")
        self.steps += 1
        self.budget.check(self.steps)
        return norm

    def _update(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None
    ) -> Tensor:
        """Reduce, then clip, then step."""
        if self.reduces_on_host:
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._add_up(grads)
            torch._foreach_div_(grads, float(self.world_size))
        else:
            xm.reduce_gradients(optimizer)
        with self._fp32_weights(parameters):
            norm = nn.utils.clip_grad_norm_(parameters, max_norm if max_norm is not None else float("inf"))
            optimizer.step()
        return norm

    @contextmanager
    def _fp32_weights(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """bf16_stochastic: updates are computed in fp32 and rounded once, when they are stored."""
        if self.precision != "bf16_stochastic":
            yield
            return
        for parameter in parameters:
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if grad is None else grad.float()
        yield
        for parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.bfloat16()

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

    def compiled(self) -> tuple[int, float]:
        return self.budget.used, compilations()[1]

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

    def save(self, state: State, path: Path) -> None:
        xm.save(state, str(path), global_master=True)

    def close(self) -> None:
        self.model = None
        xm.wait_device_ops()
        super().close()


def compilations() -> tuple[int, float]:
    """Graphs that this process has compiled, and the seconds it took."""
    found = metrics.metric_data("CompileTime")
    return (0, 0.0) if found is None else (found[0], found[1] / 1e9)
