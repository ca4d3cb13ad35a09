"""Settings of the device and of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from train.config.checks import Section, check, check_choice, setting

DEVICES = CUDA, NEURON = "cuda", "neuron"  # the supported accelerators
DEFAULT_TIMEOUT_S = 600.0  # seconds; the default time limit of a collective
JOIN_TIMEOUT_S = 600.0  # seconds to wait for ranks to join: machines of a job start within minutes, or not at all
# seconds for a collective on Trainium, where ranks also wait for each other to compile
NEURON_TIMEOUT_S = 7200.0


@dataclass(kw_only=True)
class BackendConfig(Section, prefix="backend."):
    precisions: ClassVar[tuple[str, ...]] = ("auto", "fp32", "tf32", "bf16", "fp16")

    # The backend, which backend=... sets: auto, ddp or xla; auto uses xla on Trainium 1, otherwise ddp.
    name: str = "auto"
    # The device; auto uses this machine's best one.
    device: str = setting("auto", among=("auto", "cpu", *DEVICES))
    # The precision: fp32, tf32, bf16, fp16 or auto. bf16 and fp16 use autocast, and fp16 scales the loss. tf32 is fp32,
    # but CUDA rounds the inputs of matrix products to 10 bits. auto uses bf16 if the hardware supports it natively,
    # fp16 on GPUs that support only fp16, otherwise fp32.
    precision: str = "auto"
    # The dtype to which backend=ddp rounds gradients before sending them; bf16 halves the traffic.
    grad_compression: str = setting("none", among=("none", "bf16"))
    # Keep only each layer's input, and recompute the layer in the backward pass.
    activation_checkpointing: bool = False
    # The scope of torch.compile: layers compiles each layer separately, model compiles the encoder as one graph; auto
    # compiles on GPUs if the run is long enough for this to pay off.
    compile: str = setting("auto", among=("auto", "none", "layers", "model"))
    # The use of CUDA graphs, which launch all kernels of a step in one call; None uses them with parallel=data and
    # without --import, unless the precision is fp16 or activations are recomputed, for all batch shapes that allow it;
    # true ends the run if a shape does not.
    cuda_graphs: bool | None = None
    # Make runs on GPUs bitwise reproducible, with slower kernels. CPU runs always are.
    deterministic: bool = False
    # The time limit of a collective in seconds; None uses 600, or 7,200 on Trainium.
    timeout_s: float | None = setting(None, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backend.precision", self.precision, self.precisions)
        check(
            not (self.activation_checkpointing and self.cuda_graphs),
            "backend.cuda_graphs=true does not work with backend.activation_checkpointing=true; leave one of them out",
        )
        check(
            not self.deterministic or self.name in ("auto", "ddp"),
            f"backend.deterministic=true is only for GPUs; leave it out with backend={self.name}",
        )
        check(
            self.grad_compression == "none" or self.name in ("auto", "ddp"),
            f"backend.grad_compression={self.grad_compression} is only for backend=ddp; leave it out with "
            f"backend={self.name}",
        )
        check(
            self.compile in ("none", "auto") or self.name != "xla",
            f"backend.compile={self.compile} is not for backend=xla, which always compiles; leave it out",
        )


@dataclass(kw_only=True)
class XLAConfig(BackendConfig):
    """PyTorch/XLA, on Trainium 1 or the CPU.

    It has two more precisions. With bf16_master the optimizer keeps fp32 weights, and the forward and backward passes
    use bf16 copies. With bf16_stochastic the weights are bf16, at 2 bytes each: updates are computed in fp32, and the
    hardware rounds the new weights stochastically (the CPU rounds to nearest). bf16_stochastic also accumulates
    gradients in bf16. Accumulating them in fp32, as bf16_master does, would take 4 more bytes per weight, for a total
    close to that of bf16_master.
    """

    precisions: ClassVar[tuple[str, ...]] = (
        "auto",
        "fp32",
        "bf16",
        "bf16_master",
        "bf16_stochastic",
    )

    name: str = "xla"
    # The number of micro batches that a graph processes; it must divide the number per step.
    batches_per_execution: int = setting(1, above=0)


@dataclass(kw_only=True)
class InstanceConfig(Section, prefix="instance."):
    """A machine type. Unknown figures are None; results that need them (MFU, cost) are left out, never guessed."""

    # The EC2 name of the machine type, or local for this machine.
    name: str = "local"
    # The device that runs on this type must use; None allows any.
    device: str | None = setting(None, among=DEVICES)
    # The name of the chip, such as A100.
    accelerator: str | None = None
    # The number of ranks per machine, one for each device.
    devices: int | None = setting(None, above=0)
    # The numbers of ranks that can run on one machine; None allows any number.
    rank_counts: list[int] | None = None
    # The maximum number of tokens in a rank's micro batch; larger batches are split.
    micro_batch_tokens: int | None = setting(None, above=0)
    # The memory of one rank's device.
    device_memory_gib: float | None = setting(None, above=0)
    # The peak of one rank's device in bf16 and fp16, without sparsity.
    device_tflops_bf16: float | None = setting(None, above=0)
    # The peak of one rank's device in fp32.
    device_tflops_fp32: float | None = setting(None, above=0)
    # The number of vCPUs of one machine. On x86, two of them share a core.
    vcpus: int | None = setting(None, above=0)
    # The maximum number of EFA interfaces per machine, 0 if it has none.
    efa_interfaces: int | None = setting(None, least=0)
    # The price of one machine. The files of conf/instance have the on-demand price, and the source of each figure.
    usd_per_hour: float | None = setting(None, above=0)

    def peak_flops_per_s(self, precision: str) -> float | None:
        """Return the peak of one rank's device in FLOP/s; None if it is unknown."""
        tflops = self.device_tflops_fp32 if precision == "fp32" else self.device_tflops_bf16
        # TF32 has half the peak of bf16 in NVIDIA's data sheets: 156 and 312 TFLOP/s on the A100; 989 and 1,979, both
        # with sparsity, on the H100 SXM.
        share = 0.5 if precision == "tf32" else 1.0
        if tflops is None:
            return None
        return tflops * share * 1e12


def check_backend(backend: BackendConfig, instance: InstanceConfig) -> None:
    """Raise InputError if the instance's devices cannot run the backend."""
    wrong = (instance.device, backend.name) in (("cuda", "xla"), ("neuron", "ddp"))
    check(
        not wrong or backend.device == "cpu",
        f"backend={backend.name} does not run on {instance.name}; leave it out, or choose another instance",
    )
