#!/usr/bin/env bash
# Install NVIDIA's driver and fabric manager. CUDA itself is in torch's wheels. Runs as root; a second run changes
# nothing. Not tested on a GPU.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh

driver=$(modinfo -F version nvidia 2>/dev/null || true) # a Deep Learning AMI has a driver
if [ -z "$driver" ]; then
    apt_install "nvidia-driver-$NVIDIA_DRIVER-server-open" "nvidia-utils-$NVIDIA_DRIVER-server" \
        "nvidia-fabricmanager-$NVIDIA_DRIVER"
    systemctl enable --quiet nvidia-fabricmanager.service # on machines without an NVSwitch, it exits immediately
    driver=$(modinfo -F version nvidia)
fi
[ "${driver%%.*}" -ge "$NVIDIA_DRIVER_LEAST" ] ||
    fail "the driver is $driver, but torch's wheels need $NVIDIA_DRIVER_LEAST or newer: use a newer base image"
hold nvidia
