"""Settings that split a model and its steps over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from train.config.backend import BackendConfig
from train.config.checks import Section, check, setting

PARTS_PER_RANK = 2  # model parts with schedule=interleaved: ranks wait half as long as in 1f1b, and send twice as much
# parallel=fsdp splits a model within each machine if its state takes at most this share of the devices' memory; the
# rest is for activations and gathered layers.
STATE_SHARE = 0.5
SPLITTING = ("auto", "ddp")  # backends whose ranks can communicate within a step


@dataclass(kw_only=True)
class ParallelConfig(Section, prefix="parallel."):
    # advice to save memory
    frees: ClassVar[str] = "parallel=fsdp with backend=ddp"

    # The engine, which parallel=... sets.
    name: str = "data"

    @property
    def cuts(self) -> int:
        """The number of equal parts into which a step splits each micro batch of a rank."""
        return 1

    @property
    def num_parts(self) -> int:
        """The number of parts into which the layers of the model are split."""
        return 1

    @property
    def bubble(self) -> float:
        """The minimum share of forward and backward time that a rank spends waiting for other stages."""
        return 0.0

    def replicas(self, world_size: int) -> int:
        """Return the number of rank groups that train on different rows. Raises InputError if ranks are left over."""
        return world_size

    def check_layers(self, num_layers: int) -> None:
        """Raise InputError if a model has too few layers for this split."""

    def check_goes_with(self, backend: BackendConfig) -> None:
        """Raise InputError if the backend has settings that this split does not support."""

    def num_holders(
        self, world_size: int, ranks_per_machine: int, *, devices_filled: float
    ) -> int:
        """Return the number of ranks that share one copy of the model's state.

        The weights, gradients and moments would fill this many devices; 0 if the devices' memory is unknown.
        """
        return 1


@dataclass(kw_only=True)
class DataParallelConfig(ParallelConfig):
    """Data parallelism: every rank holds all weights and gradients, and computes its share of each batch."""


@dataclass(kw_only=True)
class FSDPConfig(ParallelConfig):
    """Full sharding: every rank holds a shard of each weight, gradient and moment, and gathers layers to use them."""

    frees: ClassVar[str] = "parallel.reshard_after_forward=true or more ranks"

    name: str = "fsdp"
    # Drop a layer's gathered weights after its forward pass and gather them again for the backward pass; false keeps
    # the gathered weights of all layers until then, which reduces traffic by a third.
    reshard_after_forward: bool = True

    def num_holders(
        self, world_size: int, ranks_per_machine: int, *, devices_filled: float
    ) -> int:
        # Weights are gathered in every pass, so they cross the network between machines only if they must.
        has_room = devices_filled <= STATE_SHARE * ranks_per_machine
        if has_room and ranks_per_machine > 1 and world_size % ranks_per_machine == 0:
            return ranks_per_machine
        return world_size

    def check_goes_with(self, backend: BackendConfig) -> None:
        check_split("parallel=fsdp", backend)
        check(
            backend.compile in ("none", "auto"),
            f"backend.compile={backend.compile} has not been tested with parallel=fsdp, which gathers weights "
            "between the kernels; leave it out",
        )


def check_shards(setting: str, *, backend: str, precision: str) -> None:
    """Raise InputError if the backend or the precision does not allow a step to be split over ranks."""
    check(
        backend in SPLITTING,
        f"{setting} does not work with backend={backend}: the ranks must communicate within a step, but this backend "
        "compiles whole steps",
    )
    check(
        precision != "fp16",
        f"{setting} does not work with backend.precision=fp16: each rank would choose the loss scale from its share of "
        "the gradients; set bf16 or fp32",
    )


def check_split(setting: str, backend: BackendConfig) -> None:
    """Raise InputError if the backend does not allow a split of the model, or compresses whole gradients."""
    check_shards(setting, backend=backend.name, precision=backend.precision)
    check(
        backend.grad_compression == "none",
        f"{setting} reduces gradients itself: leave out backend.grad_compression={backend.grad_compression}",
    )


@dataclass(kw_only=True)
class PipelineConfig(ParallelConfig):
    """A pipeline: each rank holds some layers. Hidden states pass from rank to rank, and their gradients come back.

    If there are more ranks than stages, they form several pipelines, which are data parallel.
    """

    frees: ClassVar[str] = (
        "parallel.schedule=1f1b, more parallel.micro_batches or more parallel.stages"
    )

    name: str = "pipeline"
    # The number of ranks that share one copy of the model.
    stages: int = setting(2, least=2)
    # The number of equal parts into which micro_batch_size is split; they pass through the pipeline one after another.
    micro_batches: int = setting(4, least=1)
    # The order of passes: gpipe does all forward passes first; 1f1b does each backward pass as early as possible, which
    # keeps the activations of at most `stages` micro batches; interleaved is 1f1b with several parts of the model per
    # rank, so ranks wait less but send more.
    schedule: str = setting("1f1b", among=("gpipe", "1f1b", "interleaved"))

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.micro_batches >= self.stages
        needs = "at least stages"
        if self.schedule == "interleaved":
            # With fewer micro batches than stages, and with some numbers that are not multiples of the stages,
            # PyTorch's interleaved schedule starts passes before their input has arrived, without an error.
            fits = self.micro_batches % self.stages == 0
            needs = "a multiple of stages"
        check(
            fits,
            f"parallel.micro_batches={self.micro_batches} does not fit parallel.stages={self.stages} and "
            f"parallel.schedule={self.schedule}; micro_batches must be {needs}",
        )

    @property
    def cuts(self) -> int:
        return self.micro_batches

    @property
    def num_parts(self) -> int:
        return self.stages * (PARTS_PER_RANK if self.schedule == "interleaved" else 1)

    @property
    def bubble(self) -> float:
        # Ranks wait while a pipeline fills and empties. With p stages of v parts, m micro batches and equally long
        # passes, the share is (p - 1) / (v m + p - 1): Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.
        waits = self.stages - 1
        passes = self.num_parts // self.stages * self.micro_batches
        return waits / (passes + waits)

    def replicas(self, world_size: int) -> int:
        check(
            world_size % self.stages == 0,
            f"parallel.stages={self.stages} does not divide the {world_size} ranks of this run; change one of them",
        )
        return world_size // self.stages

    def check_layers(self, num_layers: int) -> None:
        check(
            self.num_parts <= num_layers,
            f"parallel.stages={self.stages} with parallel.schedule={self.schedule} splits the model into "
            f"{self.num_parts} parts, but it has only {num_layers} layers; lower parallel.stages",
        )

    def num_holders(
        self, world_size: int, ranks_per_machine: int, *, devices_filled: float
    ) -> int:
        return self.stages

    def check_goes_with(self, backend: BackendConfig) -> None:
        check_split("parallel=pipeline", backend)
        check(
            backend.compile != "model" and not backend.cuda_graphs,
            "parallel=pipeline splits the model's forward pass over ranks: set backend.compile=layers and leave "
            "out backend.cuda_graphs",
        )


SPLITS: tuple[type[ParallelConfig], ...] = (DataParallelConfig, FSDPConfig, PipelineConfig)
