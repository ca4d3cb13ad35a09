#!/usr/bin/env bash
# EFA's driver and libfabric, from AWS's installer, whose signature is checked first. Runs as root; a second run changes
# nothing. Not run on EFA hardware.
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
url=${EFA_URL:-https://efa-installer.amazonaws.com}
archive=aws-efa-installer-$EFA_INSTALLER.tar.gz

if grep -qsx "# EFA installer version: $EFA_INSTALLER" /opt/amazon/efa_installed_packages; then
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GNUPGHOME=$work
cd "$work"
for file in "$archive" "$archive.sig" aws-efa-installer.key; do
    curl -fsSL --retry 5 -o "$file" "$url/$file" || fail "$url/$file cannot be read: is efa-installer in" \
        "ami/versions.yaml a version that AWS still has, and can the builder reach the internet?"
done
gpg --batch --quiet --dearmor -o key.gpg aws-efa-installer.key
keys=$(fingerprints key.gpg)
[ "$keys" = "$EFA_KEY" ] || fail "the key of EFA's installer is $keys and not $EFA_KEY: nothing was run"
gpgv --quiet --keyring "$work/key.gpg" "$archive.sig" "$archive" ||
    fail "$archive is not signed by $EFA_KEY: nothing was run"

tar -xzf "$archive"
cd aws-efa-installer
./efa_installer.sh --yes
grep -qsx "# EFA installer version: $EFA_INSTALLER" /opt/amazon/efa_installed_packages ||
    fail "EFA's installer ended without a fault and did not install $EFA_INSTALLER"
