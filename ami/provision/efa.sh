#!/usr/bin/env bash
# Install EFA's driver and libfabric with AWS's installer, whose signature is checked first. Runs as root; a second run
# changes nothing. Not tested on EFA hardware.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh
url=${EFA_URL:-https://efa-installer.amazonaws.com}
archive=aws-efa-installer-$EFA_INSTALLER.tar.gz

if grep -qsx "# EFA installer version: $EFA_INSTALLER" /opt/amazon/efa_installed_packages; then
    exit 0
fi
export GNUPGHOME=$work
cd "$work"
for file in "$archive" "$archive.sig" aws-efa-installer.key; do
    curl -fsSL --retry 5 -o "$file" "$url/$file" || fail "$url/$file cannot be read: is efa-installer in" \
        "ami/versions.yaml a version that AWS still has, and can the builder reach the internet?"
done
gpg --batch --quiet --dearmor -o key.gpg aws-efa-installer.key
check_key key.gpg "$EFA_KEY" "EFA's installer"
gpgv --quiet --keyring "$work/key.gpg" "$archive.sig" "$archive" ||
    fail "$archive is not signed by $EFA_KEY: nothing was run"

tar -xzf "$archive"
cd aws-efa-installer
./efa_installer.sh --yes
grep -qsx "# EFA installer version: $EFA_INSTALLER" /opt/amazon/efa_installed_packages ||
    fail "EFA's installer reported no error, but did not install $EFA_INSTALLER"
