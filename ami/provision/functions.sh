# shellcheck shell=bash
# Functions that the scripts share, and this image's values. files.sh installs this file, and each script sources it.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
# shellcheck source=/dev/null
. /etc/baretrain/image.env

fail() {
    echo "error: $*" >&2
    exit 1
}

put() { install -D -m "$1" /dev/stdin "$2"; } # put MODE FILE < content

apt_install() { # apt_install PACKAGE...: also installs the running kernel's headers, with which drivers are built
    local headers=()
    [ ! -d "/lib/modules/$(uname -r)" ] || headers=("linux-headers-$(uname -r)") # a chroot may lack this folder
    apt-get update -q -o APT::Update::Error-Mode=any &&
        apt-get install -q -y --no-install-recommends --allow-downgrades --allow-change-held-packages \
            -o DPkg::Lock::Timeout=600 "${headers[@]}" "$@"
}

hold() { # hold PATTERN: keep the versions of the installed packages whose names match
    dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' | awk -v name="$1" '$1 ~ /^[hi]i/ && $2 ~ name { print $2 }' |
        xargs -r apt-mark hold >/dev/null
}

check_key() { # check_key FILE FINGERPRINT WHOSE: fail unless the file contains this key and no other
    local keys
    keys=$(gpg --batch --show-keys --with-colons "$1" |
        awk -F: '$1 == "pub" { is_key = 1 } $1 == "fpr" && is_key { printf "%s%s", sep, $10; sep = " "; is_key = 0 }')
    [ "$keys" = "$2" ] || fail "the key of $3 is $keys and not $2: nothing was installed"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
