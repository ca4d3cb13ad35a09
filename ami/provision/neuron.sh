#!/usr/bin/env bash
# Install Neuron's driver, runtime, collectives and tools, in the versions of one SDK. Runs as root; a second run
# changes nothing. Not tested on Trainium.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh
# shellcheck source=/dev/null
. /etc/os-release
url=${NEURON_APT_URL:-https://apt.repos.neuron.amazonaws.com}
keyring=/usr/share/keyrings/neuron.gpg

export GNUPGHOME=$work
new=$work/neuron.gpg
curl -fsSL --retry 5 "$url/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" | gpg --batch --dearmor >"$new"
check_key "$new" "$NEURON_KEY" "$url"
put 0644 "$keyring" <"$new"
put 0644 /etc/apt/sources.list.d/neuron.list <<EOF
deb [signed-by=$keyring] $url ${VERSION_CODENAME} main
EOF

apt_install "aws-neuronx-dkms=$NEURON_DKMS.*" "aws-neuronx-runtime-lib=$NEURON_RUNTIME.*" \
    "aws-neuronx-collectives=$NEURON_COLLECTIVES.*" "aws-neuronx-tools=$NEURON_TOOLS.*" ||
    fail "Neuron's repository lacks a package of SDK $NEURON_SDK, see above; ami/versions.yaml names the versions"
hold '^aws-neuronx-'

put 0644 /etc/profile.d/neuron.sh <<'EOF'
export PATH=/opt/aws/neuron/bin:$PATH
EOF
