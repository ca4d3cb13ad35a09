"""Settings of the device and of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from train.config.checks import Section, check, check_choice, setting

DEVICES = CUDA, NEURON = "cuda", "neuron"  # that a machine may have
DEFAULT_TIMEOUT_S = 600.0  # of a collective operation
JOIN_TIMEOUT_S = 600.0  # of ranks that join: machines of a job start within minutes, or not at all
NEURON_TIMEOUT_S = 7200.0  # the same on Trainium, where ranks also wait for each other's compilers


@dataclass(kw_only=True)
class BackendConfig(Section, prefix="backend."):
    name: str = setting("auto", among=("auto", "ddp", "xla", "neuron"))  # The backend; auto takes xla on Trainium 1,
    # else ddp.
    device: str = setting("auto", among=("auto", "cpu", *DEVICES))  # The device; auto takes this machine's best.
    precision: str = "auto"  # The precision: fp32, tf32, bf16, fp16 or auto, which takes bf16 if the hardware
    # multiplies it natively, fp16 on GPUs that have only that, or else fp32. bf16 and fp16 are autocast, fp16 with a
    # scaled loss; tf32 is fp32 of which CUDA rounds the factors of products to 10 bits.
    grad_compression: str = setting("none", among=("none", "bf16"))  # The form in which ranks of backend=ddp send their
    # gradients; bf16 halves the bytes.
    activation_checkpointing: bool = False  # Keep each layer's input only; backward computes the layer again.
    norms: str = setting("auto", among=("auto", "fp32", "bf16"))  # The precision in which norms, computed in fp32,
    # return to layers in bf16; auto takes bf16 on GPUs where the model is compiled, which saves a third of the memory
    # that it moves.
    compile: str = setting("auto", among=("auto", "none", "layers", "model"))  # The part that torch.compile turns into
    # kernels, each layer or the encoder as one graph; auto takes one of them on GPUs, in runs long enough to repay it.
    cuda_graphs: bool | None = None  # The switch that sends a step's kernels to the GPU in one call; None does so on
    # one rank, without --import, unless the precision is fp16, activations are recomputed, or a step waits for the GPU.
    compile_cache: str | None = None  # The folder or s3://bucket/prefix that keeps compiled graphs for other machines
    # and for a run that starts again, as trusted as the code itself; None keeps them on this machine's own disk only.
    timeout_s: float | None = setting(None, above=0)  # The limit of a collective; None takes 600, on Trainium 7,200.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            type(self) is BackendConfig or self.name == type(self).name,
            f"backend.name={self.name} does not go with the settings of backend={type(self).name}: use "
            f"backend={self.name}",
        )
        check_choice("backend.precision", self.precision, self.precisions())
        check(
            not (self.activation_checkpointing and self.cuda_graphs),
            "backend.cuda_graphs=true is not for backend.activation_checkpointing=true; leave one of them out",
        )
        check(
            self.compile in ("none", "auto") or self.name != "xla",
            f"backend.compile={self.compile} is not for backend=xla, which compiles every graph by itself",
        )
        check(
            self.compile != "none" or self.compile_cache is None,
            "backend.compile_cache is for backend.compile=layers or model; on trn1 set NEURON_COMPILE_CACHE_URL",
        )

    def precisions(self) -> tuple[str, ...]:
        """Return the values that `precision` may have."""
        return ("auto", "fp32", "tf32", "bf16", "fp16")


@dataclass(kw_only=True)
class XLAConfig(BackendConfig):
    """PyTorch/XLA, on Trainium 1 or the CPU.

    It has two more precisions: bf16_master (everything in bf16, computed from fp32 weights that the optimizer keeps)
    and bf16_stochastic (bf16 weights, updated in fp32 and rounded stochastically by the hardware, at 2 bytes a weight;
    the CPU rounds to nearest). bf16_stochastic adds the gradients of micro batches up in bf16 too: fp32 sums would need
    4 bytes more a weight, nearly the memory of bf16_master, whose sums are fp32.
    """

    name: str = "xla"
    batches_per_execution: int = setting(1, above=0)  # The micro batches in one graph, at most those of a step.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reduces_plainly(self, self.name)

    def precisions(self) -> tuple[str, ...]:
        return ("auto", "fp32", "bf16", "bf16_master", "bf16_stochastic")


@dataclass(kw_only=True)
class NeuronConfig(BackendConfig):
    """Native PyTorch on Trainium 2 and 3. Not run on hardware."""

    name: str = "neuron"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reduces_plainly(self, self.name)
        check(not self.cuda_graphs, "backend.cuda_graphs=true is for GPUs; leave it out with backend=neuron")
        check(
            self.compile_cache is None,
            "backend.compile_cache is for GPUs and CPUs; set TORCH_NEURONX_NEFF_CACHE_DIR with backend=neuron",
        )

    def precisions(self) -> tuple[str, ...]:
        return ("auto", "fp32", "bf16")


def check_reduces_plainly(cfg: BackendConfig, name: str) -> None:
    """Raise InputError if a reduction of gradients is one that only backend=ddp has."""
    check(
        cfg.grad_compression == "none",
        f"backend.grad_compression={cfg.grad_compression} is for backend=ddp; leave it out with backend={name}",
    )


@dataclass(kw_only=True)
class InstanceConfig(Section, prefix="instance."):
    """A machine type. Unknown figures are None; results that need them (MFU, cost) are left out, never guessed."""

    name: str = "local"  # The name of the machine type, as EC2 has it; local is this machine.
    device: str | None = setting(None, among=DEVICES)  # The device that a run here needs; None takes any.
    accelerator: str | None = None  # The name of the chip, as A100.
    devices: int | None = setting(None, above=0)  # The number of ranks that fill one machine.
    rank_counts: list[int] | None = None  # The numbers of ranks that one machine can run; None allows any.
    micro_batch_tokens: int | None = setting(None, above=0)  # The most tokens of a rank at a time; more are split.
    device_memory_gib: float | None = setting(None, above=0)  # The memory of one rank's device.
    device_tflops_bf16: float | None = setting(None, above=0)  # The dense peak of a rank's device, of fp16 as well.
    device_tflops_fp32: float | None = setting(None, above=0)  # The dense peak of a rank's device in fp32.
    vcpus: int | None = setting(None, above=0)  # The vCPUs of a machine; on x86 two of them, threads, share a core.
    network_cards: int | None = setting(None, above=0)  # The number of network cards of one machine.
    efa_interfaces: int | None = setting(None, least=0)  # The most EFA interfaces of a machine; 0 is none.
    network_gbit_per_s: float | None = setting(None, above=0)  # The speed of all cards of a machine, in each direction.
    device_link_gbyte_per_s: float | None = setting(None, above=0)  # The speed from a device to others, each direction.
    usd_per_hour: float | None = setting(None, above=0)  # The price of one machine on demand.
    usd_per_hour_spot: float | None = setting(None, above=0)  # The price of one machine on spot, which changes by the
    # hour and the zone, so that the catalogue has none; aws ec2 describe-spot-price-history tells it.
    price_date: str | None = None  # The date of the prices, such as 2026-11-09.
    source: str | None = None  # The origin and the date of the figures.

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.rank_counts
        ok = counts is None or (counts != [] and min(counts) > 0)
        check(ok, f"instance.rank_counts={counts} must be numbers above 0, or null for any")

    def peak_flops_per_s(self, precision: str) -> float | None:
        """Return the peak of one rank's device; None if it is unknown."""
        tflops = self.device_tflops_fp32 if precision == "fp32" else self.device_tflops_bf16
        # NVIDIA's data sheets: 156 and 312 TFLOP/s on the A100; on the H100 SXM 989 and 1,979, both with sparsity.
        share = 0.5 if precision == "tf32" else 1.0
        return None if tflops is None else tflops * share * 1e12


def check_backend(backend: BackendConfig, instance: InstanceConfig) -> None:
    """Raise InputError if no device of the instance runs the backend."""
    wrong = (instance.device, backend.name) in (("cuda", "xla"), ("cuda", "neuron"), ("neuron", "ddp"))
    check(
        not wrong or backend.device == "cpu",
        f"backend={backend.name} does not run on {instance.name}; leave it out, or choose another instance",
    )
