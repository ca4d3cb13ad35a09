#!/usr/bin/env bash
# On a machine with a GPU: each shape, in bf16, against the Trainer with its defaults and compiled; JSON for each shape.
# Needs accelerate in .venv/peers (make .venv/peers/.ready). Not run on hardware; there is no BERT-large yet.
set -euo pipefail
cd "$(dirname "$0")/.."
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
for shape in base_gpu long_gpu large_gpu large_long_gpu xlarge_gpu xlarge_long_gpu; do
    PYTHONPATH=.venv/peers .venv/bin/python -m benchmarks.step --shape "$shape" --precision bf16 --rounds 2 --steps 20 \
        --contestants ours trainer ours_compiled trainer_compiled
done
