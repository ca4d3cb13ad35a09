#!/usr/bin/env bash
# Fail the build unless this image can train: check packages, devices, EFA and forks, and train briefly on the CPU. Then
# write /etc/baretrain/manifest.json. DEVICES=absent skips the checks that need an accelerator.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh
python=/opt/baretrain/venv/bin/python
cd "$work"
export HOME=$work PATH=/opt/aws/neuron/bin:/opt/amazon/efa/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1

"$python" -m ami manifest "$work/manifest.json" # fails if a version differs from ami/versions.yaml
"$python" -c "import boto3, datasets, launch, torch, train.loop, transformers"
"$python" - <<'EOF'
import multiprocessing
import torch

total = torch.ones(1000).sum()  # starts torch's threads: a fork must work despite them
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert total == 1000
EOF

if [ "${DEVICES:-}" != absent ]; then
    type=$(cat /sys/devices/virtual/dmi/id/product_name)
    if [ "$IMAGE" = neuron ]; then
        neuron-ls -j | "$python" -c "import json, sys; sys.exit(not json.load(sys.stdin))" ||
            fail "neuron-ls sees no device on $type"
    else
        "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || fail "torch sees no GPU on $type"
    fi
    modinfo efa >/dev/null || fail "the kernel $(uname -r) has no module efa"
    fi_info --version >/dev/null || fail "libfabric does not run: is /opt/amazon/efa there?"
    if compgen -G "/sys/class/infiniband/*" >/dev/null; then
        fi_info -p efa >/dev/null || fail "this machine has EFA, but libfabric does not see it"
    fi
    "$python" -m train doctor --instance "$type"
fi

timeout 600 "$python" -m train prepare corpus=text corpus.path=/usr/share/common-licenses/GPL-3 output=data \
    seq_len=32 tokenizer.vocab_size=500 validation_fraction=0.1 >prepare.log 2>&1 ||
    fail "baretrain prepare failed: $(tail -1 prepare.log)"
timeout 600 "$python" -m train experiment=demo backend=ddp backend.device=cpu data.path=data run_dir=run \
    max_steps=20 eval_every=20 checkpoint.every=20 >train.log 2>&1 ||
    fail "training on the CPU failed: $(tail -1 train.log)"

put 0644 /etc/baretrain/manifest.json <manifest.json
echo "smoke test passed"
