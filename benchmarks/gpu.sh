#!/usr/bin/env bash
# The product beside the Trainer at its best on one GPU, in eight minutes, as one table: python -m benchmarks.gpu.
#     benchmarks/gpu.sh --pack    # where there is internet: wheels of what the machine below lacks, into build/gpu_wheels
#     [PYTHON=python3] benchmarks/gpu.sh [--output gpu.json] [--only NAME ...] [--tiny]
# That machine needs no internet, but Python 3.12 with torch, transformers, accelerate, pandas, pyarrow and scikit-learn.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels=build/gpu_wheels
if [ "${1:-}" = --pack ]; then
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$wheels" antlr4-python3-runtime==4.9.3 # has none
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
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} # of several GPUs the Trainer would take all
"$python" -m benchmarks.gpu "$@"
