#!/usr/bin/env bash
# Our training and the Hugging Face Trainer on one GPU, in eight minutes, as one table: python -m benchmarks.gpu.
#     benchmarks/gpu.sh --pack    # on a machine with internet access: downloads wheels into build/gpu_wheels
#     [PYTHON=python3] benchmarks/gpu.sh [--output gpu.json] [--only NAME ...] [--tiny]
# The GPU machine needs these wheels, no internet access, and Python 3.12 with torch, transformers, accelerate, pandas,
# pyarrow and scikit-learn.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels=build/gpu_wheels
if [ "${1:-}" = --pack ]; then
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$wheels" antlr4-python3-runtime==4.9.3 # not on PyPI as a wheel
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps -c constraints.txt -d "$wheels" --python-version 3.12 \
        --only-binary=:all: --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
        hydra-core omegaconf boto3 botocore s3transfer jmespath tenacity datasets dill multiprocess
    du -sh "$wheels"
    exit
fi
if [ -d "$wheels" ] && ! "$python" -c 'import hydra, datasets, boto3' 2>/dev/null; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$packages" "$wheels"/*.whl
    export PYTHONPATH="$packages:${PYTHONPATH:-}"
fi
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} # the Trainer would use all GPUs
"$python" -m benchmarks.gpu "$@"
