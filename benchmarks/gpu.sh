#!/usr/bin/env bash
# On one GPU: shapes (all by default), in bf16, against the Trainer with its defaults and compiled; JSON for each.
#     [PYTHON=python3] benchmarks/gpu.sh [SHAPE ...]    # a python with accelerate: make .venv/peers/.ready
set -euo pipefail
cd "$(dirname "$0")/.."
shapes=(base_gpu long_gpu large_gpu large_long_gpu xlarge_gpu xlarge_long_gpu)
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}  # of several the Trainer would take all
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
for shape in "${@:-${shapes[@]}}"; do
    PYTHONPATH=.venv/peers:${PYTHONPATH:-} "${PYTHON:-.venv/bin/python}" -m benchmarks.step --shape "$shape" --precision bf16 --rounds 5 \
        --contestants ours trainer ours_compiled trainer_compiled
done
