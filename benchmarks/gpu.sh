#!/usr/bin/env bash
# What to run on one GPU. Each part fits into one call of 10 minutes; core and speed together take at most 13.
#     benchmarks/gpu.sh pack     on a machine with internet access: downloads wheels into build/gpu_wheels
#     benchmarks/gpu.sh core     5 min   recorded steps against plain ones, and the tests of what only a GPU can show
#     benchmarks/gpu.sh speed    8 min   our training and the Hugging Face Trainer, as one table: python -m benchmarks.gpu
#     benchmarks/gpu.sh tests    9 min   the tests of what trains, on the GPU, which ranks share (make test-gpu)
#     benchmarks/gpu.sh rest     9 min   deterministic runs, traces, fp16, restarts, sanitizer, ranks that share the GPU, the memory
#                                        of FSDP, the host's time, baretrain doctor --collectives
# The GPU machine needs these wheels, no internet access, and Python 3.12 with torch, transformers, accelerate, pandas,
# pyarrow and scikit-learn. Logs and tables are written to $OUT [out]. DEVICE=cpu checks these parts without a GPU.
# Arguments after the part's name are the program's: benchmarks/gpu.sh speed --rows build/tweets.csv
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
wheels=build/gpu_wheels
part=${1:?pack, core, speed, tests or rest}
shift
pip=("$python" -m pip --quiet --disable-pip-version-check)

if [ "$part" = pack ]; then
    set -e
    "${pip[@]}" wheel --no-deps -c constraints.txt -w "$wheels" antlr4-python3-runtime==4.9.3 seqeval s3torchconnector # not on PyPI as wheels
    for_gpu=(-c constraints.txt -d "$wheels" --python-version 3.12 --only-binary=:all:
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64)
    "${pip[@]}" download --no-deps "${for_gpu[@]}" hydra-core omegaconf boto3 botocore s3transfer jmespath tenacity datasets dill \
        s3torchconnectorclient urllib3 xxhash multiprocess nvidia-ml-py sentencepiece tensorboard tensorboard-data-server \
        grpcio protobuf absl-py markdown werkzeug pytest pytest-timeout pytest-xdist execnet iniconfig pluggy hypothesis sortedcontainers \
        torchmetrics lightning-utilities
    du -sh "$wheels"
    exit
fi

OUT=${OUT:-out}
mkdir -p "$OUT"
if [ -d "$wheels" ] && ! "$python" -c 'import hydra, datasets, boto3, s3torchconnector, pytest' 2>/dev/null; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    "${pip[@]}" install --no-index --no-deps --target "$packages" "$wheels"/*.whl || exit 1
    export PYTHONPATH="$packages:${PYTHONPATH:-}"
fi
export TOKENIZERS_PARALLELISM=false
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} # the Trainer would use all GPUs

worst=0
# run SECONDS COMMAND: with its output in the part's log, and its last lines here
run() {
    local seconds=$1 code
    shift
    printf '== %s  %s\n' "$(date +%T)" "$*" | tee -a "$OUT/$part.log"
    timeout -k 5 "$seconds" "$@" 2>&1 | tee -a "$OUT/$part.log" | grep --line-buffered -E '^(ok|bad|BAD|FAILED|ERROR|\[|\|)|passed|failed'
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || worst=1
    printf '   exit code %s\n' "$code" | tee -a "$OUT/$part.log"
}
tests=("$python" -m pytest -q -p no:cacheprovider -m "not services" --maxfail=30)
modules() { for name in "$@"; do ls tests/*/"test_$name.py"; done; }

case $part in
core)
    [ "$device" = cpu ] || nvidia-smi | tee "$OUT/nvidia-smi.txt"
    run 30 "$python" -c 'import torch, transformers; print("ok  torch", torch.__version__, torch.version.cuda, "transformers", transformers.__version__)'
    run 150 "$python" -m benchmarks.gpu_checks core --device "$device" "$@"
    mapfile -t files < <(modules captured nonfinite optim precision)
    run 120 env TEST_DEVICE="$device" PYTHONPATH="${PYTHONPATH:-}:." "${tests[@]}" --numprocesses=4 "${files[@]}"
    ;;
speed)
    # the part's own arguments win
    run 480 "$python" -m benchmarks.gpu --budget-s 460 --output "$OUT/gpu.json" "$@"
    ;;
tests)
    mapfile -t files < <(modules captured nonfinite equality loop optim precision saver checkpoints classify regress multilabel \
        ner qa sop finetune compiled fsdp sharded_checkpoints pipeline ranks profile bench faults)
    run 560 env TEST_DEVICE="$device" PYTHONPATH="${PYTHONPATH:-}:." "${tests[@]}" --numprocesses=4 "$@" "${files[@]}"
    ;;
rest)
    run 400 "$python" -m benchmarks.gpu_checks rest --device "$device" "$@"
    ranks=(env PYTHONPATH="${PYTHONPATH:-}:." "$python" -m torch.distributed.run --standalone --nproc-per-node=2)
    [ "$device" = cpu ] || ranks+=(tests/sharing_gpus.py)
    run 45 "${ranks[@]}" train/__main__.py doctor --collectives backend=ddp backend.device="$device"
    # BERT-base on two ranks: the host's time, which must be below 3 ms if recorded
    for way in "" --plain; do
        [ "$device" = cpu ] || run 50 "${ranks[@]}" benchmarks/host_time.py $way
    done
    ;;
*)
    echo "benchmarks/gpu.sh: $part is not a part; choose pack, core, speed, tests or rest" >&2
    exit 2
    ;;
esac
exit "$worst"
