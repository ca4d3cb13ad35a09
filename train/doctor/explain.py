"""What an error text means: a table of patterns, causes and cures, the most specific first.

The Neuron rows follow the SDK's troubleshooting guide for training and the issue trackers of torch-xla and the SDK;
their cures were not run on hardware.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RELOAD = "sudo modprobe -r neuron && sudo modprobe neuron"
INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
DOCTOR = "python -m train.doctor"


@dataclass(frozen=True)
class Cause:
    name: str
    pattern: str  # a regular expression; case does not count, "." takes no line end
    cause: str
    cure: str


def explain(text: str) -> list[Cause]:
    """Rows whose pattern is in the text (a message or a whole log), in the order of the table."""
    return [cause for cause in CAUSES if re.search(cause.pattern, text, re.IGNORECASE | re.MULTILINE)]


CAUSES = (
    # ---- Trainium: installation ----
    Cause(
        "the stub of torch-neuronx",
        r"WRONG PACKAGE|no module named '?(torch_neuronx|libneuronxla)|libneuronpjrt\S*.*(not found|no such file)",
        "the public package index holds only an empty stub of torch-neuronx; the real one is in Neuron's index",
        f"pip uninstall torch-neuronx, then pip install neuronx-cc 'torch-neuronx==2.9.*' {INDEX}",
    ),
    Cause(
        "glibc is too old",
        r"GLIBC_2\.\d+'? not found",
        "torch-neuronx 2.9 needs glibc 2.35, which Amazon Linux 2023 does not have",
        "launch from an Ubuntu 24.04 image (22.04 will do)",
    ),
    Cause(
        "protobuf, by the order of installation",
        r"Descriptors cannot (not )?be created directly",
        "torch-neuronx was installed after neuronx-cc and brought another protobuf",
        "pip install --force-reinstall neuronx-cc, at its old version",
    ),
    Cause(
        "a call that torch-xla has dropped",
        r"has no attribute '?(xrt_world_size|get_ordinal)|xrt_world_size",
        "torch-xla 2.7 and newer have no XRT; an older library still calls it",
        "update that library; in your own code torch_xla.runtime.world_size() and global_ordinal()",
    ),
    Cause(
        "the checkpointing of torch on XLA",
        r"module 'torch' has no attribute 'xla'",
        "torch.utils.checkpoint does not work on XLA",
        "torch_xla.utils.checkpoint.checkpoint(..., use_reentrant=True)",
    ),
    Cause(
        "a compiled graph of another version",
        r"Attempting to load an incompatible model",
        "the compile cache holds graphs of another neuronx-cc than the runtime reads",
        f"{DOCTOR} compares the versions; then neuron_parallel_compile --command clean",
    ),
    # ---- Trainium: the device ----
    Cause(
        "the run is on the CPU",
        r"Defaulting to PJRT_DEVICE=CPU",
        "torch-xla found no Neuron device or plugin and goes on with the CPU of an expensive machine",
        f"{DOCTOR} (driver, torch-neuronx, holders); export PJRT_DEVICE=NEURON makes it fail instead",
    ),
    Cause(
        "somebody holds the cores",
        r"NeuronCore\(?s?\)? not available|nrt_allocate_neuron_cores",
        "another process, often a worker left over from an interrupted run, has the cores",
        f"{DOCTOR} names it: kill PID; then {RELOAD}",
    ),
    Cause(
        "the chip is in a bad state",
        r"One or more engines are running|Timestamp program stop timeout|Unexpected number of CC notifications",
        "an interrupted run left the engines running",
        f"end neuron-top and neuron-monitor, then {RELOAD}",
    ),
    Cause(
        "a chip does not open",
        r"Could not open the nd\d+|TDRV not initialized|nrt_init failed",
        "the driver is not loaded, a chip is missing or somebody holds it",
        f"{DOCTOR} counts them; {RELOAD}; if a chip stays away, stop and start the instance",
    ),
    Cause(
        "execution took too long",
        r"Missing infer_status notification|inference timeout|NRT_TIMEOUT",
        "a graph waited longer than the runtime allows, usually for another rank that still compiles",
        "export NEURON_RT_EXEC_TIMEOUT=600 (seconds); if it comes back, look at the rank that is behind",
    ),
    # ---- Trainium: collectives ----
    Cause(
        "ranks that wait for a graph",
        r"Timeout waiting for RX",
        "all ranks must load a graph with collectives within 120 s. Near 'No candidate found under' or a row of dots "
        "another rank compiles and the warning goes away; otherwise a rank died or built another graph",
        "compile before the run (python -m train.precompile), then look for the first error among log/rank_*.txt",
    ),
    Cause(
        "EFA does not start",
        r"OFI plugin initNet\(\) failed|is EFA enabled\?|No eligible providers|fi_getinfo.*No data available",
        "machines are to speak over EFA and libfabric finds no interface, or the security group does not let it",
        f"{DOCTOR} --machines 2 (count, libfabric); the security group must allow all traffic to and from itself",
    ),
    Cause(
        "Neuron's collectives do not find each other",
        r"nrt_build_global_comm|nrt_load_collectives|Call to recv failed",
        "NEURON_RT_ROOT_COMM_ID is unset, differs between machines or has the port of MASTER_PORT; or a peer died",
        "on every machine export NEURON_RT_ROOT_COMM_ID=$MASTER_ADDR:48620, a port that is not MASTER_PORT",
    ),
    Cause(
        "a start of collectives that hangs",
        r"(hang|stuck)\w* .*(NCCL|collective)\w* init|hang\w* in init",
        "the port of Neuron's collectives was given to another connection",
        "sudo sysctl -w net.ipv4.ip_local_reserved_ports=48620; one machine: NEURON_RT_ROOT_COMM_ID=localhost:48620",
    ),
    Cause(
        "XLA on the CPU has no collectives",
        r"Expected \d+ threads to join the rendezvous",
        "torch-xla's CPU client ran a collective of several replicas, which it cannot",
        "start the ranks by torchrun: python -m train adds their gradients on the hosts",
    ),
    Cause(
        "every rank trains alone",
        r"world[ _]size\W{0,4}(is |of |=|:)*\s*1\b|would train apart",
        "the ranks do not see each other: the process group was made after the first call to XLA, or without torchrun",
        "torchrun --nproc-per-node=N -m train ...; init_process_group('xla', init_method='xla://') comes first",
    ),
    # ---- Trainium: compiler ----
    Cause(
        "the compiler was killed",
        r"neuronx-cc.*(exit\w* (code |status )?|code |signal )-?9\b|neuronx-cc.*(Killed|SIGKILL)",
        "the machine ran out of memory while graphs were compiled side by side (trn1.2xlarge has 32 GiB)",
        "NEURON_PARALLEL_COMPILE_MAX_RETRIES=1, fewer at a time, or compile on a larger machine into an S3 cache",
    ),
    Cause(
        "values read while graphs are collected",
        r"INVALID_ARGUMENT: Input dimension|NEURON_EXTRACT_GRAPHS_ONLY",
        "while graphs are collected every result is 0, and code that depends on results goes astray",
        "python -m train.precompile judges and saves nothing; for a run of its own unset NEURON_EXTRACT_GRAPHS_ONLY",
    ),
    Cause(
        "file locks on a network disk",
        r"\[?Errno (61|37|524)\]?|No locks available|neuron-compile-cache.*\.lock",
        "the compile cache is on NFS, EFS or Lustre, whose locks neuronx-cc cannot use, or a lock was left behind",
        "export NEURON_COMPILE_CACHE_URL=/var/tmp/neuron-compile-cache (or s3://...); "
        "old locks: neuron_parallel_compile --command clear-locks",
    ),
    # ---- memory and disk ----
    Cause(
        "shared memory of the loader",
        r"insufficient shared memory|Bus error|killed by signal: Bus",
        "loader workers pass batches through /dev/shm, which is full; containers have 64 MiB",
        "docker run --shm-size=8g, or data.num_workers=0",
    ),
    Cause(
        "a fork without huge pages",
        r"Errno 12\]? Cannot allocate memory",
        "a loader worker is forked while EFA holds the huge pages",
        "export FI_EFA_USE_HUGE_PAGE=0, or data.num_workers=0",
    ),
    Cause(
        "device memory",
        r"CUDA out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED|Failed to allocate .*device",
        "weights, optimizer state and activations do not fit in the memory of the device",
        "a smaller micro_batch_size (accumulation makes up for it), seq_len or model; who else is there: " + DOCTOR,
    ),
    Cause(
        "the system killed a rank",
        r"SIGKILL|exitcode\W+-9\b|signal 9\b|Out of memory: Killed process|oom-kill|^Killed$",
        "the machine ran out of memory, mostly while checkpoints are read or written by many ranks at once",
        "dmesg | grep -i oom; export MALLOC_ARENA_MAX=64; fewer data.num_workers",
    ),
    Cause(
        "the disk is full",
        r"No space left on device|Errno 28",
        "the run folder, /tmp or the compile cache has no room (or no inodes: df -i)",
        f"{DOCTOR} shows each; delete old runs, or point run_dir, TMPDIR or NEURON_COMPILE_CACHE_URL elsewhere",
    ),
    Cause(
        "too many open files",
        r"Too many open files|Errno 24\b",
        "ranks and loader workers opened more files than the limit",
        "ulimit -n 65535",
    ),
    # ---- GPU ----
    Cause(
        "the NVIDIA driver",
        r"NVIDIA-SMI has failed|CUDA driver version is insufficient|driver on your system is too old|no CUDA-capable",
        "the driver is not loaded, or older than this build of torch needs",
        "sudo modprobe nvidia, update the driver and reboot, or install a torch of an older CUDA",
    ),
    Cause(
        "more ranks than GPUs",
        r"invalid device ordinal|Duplicate GPU detected",
        "torchrun started more ranks than this machine shows GPUs",
        "--nproc-per-node = the number that nvidia-smi -L lists; look at CUDA_VISIBLE_DEVICES",
    ),
    Cause(
        "a GPU that this torch does not know",
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "this build of torch has no code for this GPU",
        "install a newer torch (a newer CUDA)",
    ),
    # ---- several ranks or machines ----
    Cause(
        "a port in use",
        r"server socket has failed to (bind|listen)|Address already in use|EADDRINUSE",
        "another run, or what is left of one, listens on MASTER_PORT; torchrun and the process group each take a port",
        "torchrun --master-port=29513 (any free one); leftovers: ss -ltnp, then kill PID",
    ),
    Cause(
        "a collective that did not end",
        r"Watchdog caught collective operation timeout|collective operation timeout|ProcessGroup\w+ .*timed out",
        "one rank did not come: it failed, its loader hangs, or it took another number of steps",
        "find the rank whose log ends first; py-spy dump --pid PID shows where it waits",
    ),
    Cause(
        "ranks that do not meet",
        r"Socket Timeout|DistStoreError|Timed out after \d+ seconds waiting for clients|connectFullMesh failed",
        "a machine is missing, a port is closed, or a host name leads to 127.0.1.1",
        f"{DOCTOR} --machines 2 on each; the security group must let them through; export GLOO_SOCKET_IFNAME=ens5",
    ),
    Cause(
        "another rank died first",
        r"Connection (reset|closed) by (remote )?peer|ncclRemoteError|Broken pipe|Socket closed",
        "the rank at the other end is gone; the cause is in its log, not in this one",
        "find the log that ends first: ls -t log/rank_*.txt | tail -1; and log/exit_rank_*.json",
    ),
    # ---- S3 ----
    Cause(
        "the clock and S3",
        r"RequestTimeTooSkewed|difference between the request time and the current time",
        "this machine's clock is more than 15 minutes off",
        "sudo chronyc makestep",
    ),
    Cause(
        "no credentials for S3",
        r"NoCredentialsError|Unable to locate credentials|ExpiredToken|InvalidAccessKeyId",
        "there are no credentials, or they are out of date",
        f"attach a role to the instance or aws sso login; {DOCTOR} --bucket s3://BUCKET",
    ),
    Cause(
        "S3 refuses",
        r"AccessDenied|\(403\) when calling|HeadBucket.*Forbidden|PermanentRedirect|NoSuchBucket",
        "the role may not, the bucket is elsewhere or does not exist",
        f"{DOCTOR} --bucket s3://BUCKET says which",
    ),
    # ---- learning ----
    Cause(
        "numbers that are not numbers",
        r"\bloss\W{0,4}(is |=|:)*\s*(nan|inf)\b|non-?finite",
        "a learning rate or initialisation that is too large, or values that bf16 cannot hold",
        "a lower optim.lr, a longer warm-up; backend.precision=fp32 for some steps tells which",
    ),
)
