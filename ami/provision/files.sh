#!/usr/bin/env bash
# Copy the files that Packer uploaded to /tmp/baretrain to where the other scripts look for them. Runs as root.
set -euo pipefail

from=/tmp/baretrain
rm -rf /opt/baretrain/dist
install -d -m 0755 /etc/baretrain /opt/baretrain/dist
install -m 0644 "$from/image.env" "$from/functions.sh" /etc/baretrain
install -m 0644 "$from/requirements.txt" "$from/neuron.txt" "$from"/baretrain-*.whl /opt/baretrain/dist
