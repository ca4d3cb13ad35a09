#!/usr/bin/env bash
# NVIDIA's driver and fabric manager; CUDA itself comes with the wheels of torch. Runs as root; a second run changes
# nothing. Not run on a GPU.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 1
}
# shellcheck source=/dev/null
. /etc/baretrain/image.env
export DEBIAN_FRONTEND=noninteractive

driver=$(modinfo -F version nvidia 2>/dev/null || true) # a Deep Learning AMI has one
if [ -z "$driver" ]; then
    apt-get update -q -o APT::Update::Error-Mode=any
    headers=()
    [ ! -d "/lib/modules/$(uname -r)" ] || headers=("linux-headers-$(uname -r)")
    apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=600 "${headers[@]}" \
        "nvidia-driver-$NVIDIA_DRIVER-server-open" "nvidia-utils-$NVIDIA_DRIVER-server" \
        "nvidia-fabricmanager-$NVIDIA_DRIVER"
    systemctl enable --quiet nvidia-fabricmanager.service # where there is no NVSwitch it ends at once
    driver=$(modinfo -F version nvidia)
fi
[ "${driver%%.*}" -ge "$NVIDIA_DRIVER_LEAST" ] ||
    fail "the driver is $driver, the wheels of torch need $NVIDIA_DRIVER_LEAST or newer: take a newer base image"
dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' |
    awk '$1 ~ /^[hi]i/ && $2 ~ /nvidia/ { print $2 }' | xargs -r apt-mark hold >/dev/null
