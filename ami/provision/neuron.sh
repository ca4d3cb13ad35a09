#!/usr/bin/env bash
# Neuron's driver, runtime, collectives and tools, in the versions of one SDK. Runs as root; a second run changes
# nothing. Not run on Trainium.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 1
}
# Fingerprints of the keys in a file, without those of their subkeys, in one line.
fingerprints() {
    gpg --batch --show-keys --with-colons "$1" |
        awk -F: '$1 == "pub" { is_key = 1 } $1 == "fpr" && is_key { printf "%s%s", sep, $10; sep = " "; is_key = 0 }'
}
# shellcheck source=/dev/null
. /etc/baretrain/image.env
# shellcheck source=/dev/null
. /etc/os-release
url=${NEURON_APT_URL:-https://apt.repos.neuron.amazonaws.com}
keyring=/usr/share/keyrings/neuron.gpg

glibc=$(ldd --version | awk 'NR == 1 { print $NF }')
[ "$(printf '%s\n' 2.35 "$glibc" | sort -V | head -1)" = 2.35 ] ||
    fail "$PRETTY_NAME has glibc $glibc, torch-neuronx 2.9 needs 2.35: build from Ubuntu 24.04"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GNUPGHOME=$work
new=$work/neuron.gpg
curl -fsSL --retry 5 "$url/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" | gpg --batch --dearmor >"$new"
keys=$(fingerprints "$new")
[ "$keys" = "$NEURON_KEY" ] || fail "the key of $url is $keys and not $NEURON_KEY: nothing was installed"
install -D -m 0644 "$new" "$keyring"
install -D -m 0644 /dev/stdin /etc/apt/sources.list.d/neuron.list <<EOF
deb [signed-by=$keyring] $url ${VERSION_CODENAME} main
EOF

export DEBIAN_FRONTEND=noninteractive
apt-get update -q -o APT::Update::Error-Mode=any
headers=()
[ ! -d "/lib/modules/$(uname -r)" ] || headers=("linux-headers-$(uname -r)") # a chroot has no kernel of its own
packages=(
    "aws-neuronx-dkms=$NEURON_DKMS.*"
    "aws-neuronx-runtime-lib=$NEURON_RUNTIME.*"
    "aws-neuronx-collectives=$NEURON_COLLECTIVES.*"
    "aws-neuronx-tools=$NEURON_TOOLS.*"
)
apt-get install -q -y --no-install-recommends --allow-downgrades --allow-change-held-packages \
    -o DPkg::Lock::Timeout=600 "${headers[@]}" "${packages[@]}" ||
    fail "Neuron's repository lacks a package of SDK $NEURON_SDK, see above; ami/versions.yaml says which are wanted"
apt-mark hold "${packages[@]%%=*}" >/dev/null

install -D -m 0644 /dev/stdin /etc/profile.d/neuron.sh <<'EOF'
export PATH=/opt/aws/neuron/bin:$PATH
EOF
