#!/usr/bin/env bash
# Make the virtual environment /opt/baretrain/venv with baretrain's wheel and the packages that were resolved before the
# build. Runs as root; a second run changes nothing. PIP_ARGS may
# contain more arguments for pip, for example to use a mirror.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh
top=/opt/baretrain
venv=$top/venv
wheels=("$top"/dist/baretrain-*.whl)
[[ -f ${wheels[0]} && ${#wheels[@]} = 1 ]] || fail "$top/dist must contain one wheel of baretrain"
found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$found" = "$PYTHON" ] || fail "python3 is $found, but the packages were resolved for $PYTHON: use another base image"
cd "$top/dist"

# Install only packages that were resolved before the build, verify their sha256, and use one index at a time: pip reads
# no configuration file, which could name another. Packages without a wheel are built with the resolved setuptools;
# otherwise pip would download setuptools without verifying a hash.
read -ra more <<<"${PIP_ARGS:-}"
pip_install() {
    PIP_CONFIG_FILE=/dev/null "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
        --require-hashes --no-deps --no-build-isolation "${more[@]}" "$@" || fail "pip rejected a package, see above"
}

wanted=$(sha256sum -- *.whl requirements.txt neuron.txt)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    grep '^setuptools==' requirements.txt >"$work/builder.txt" || fail "requirements.txt names no setuptools"
    pip_install -r "$work/builder.txt"
    [ ! -s neuron.txt ] || pip_install --index-url "$NEURON_INDEX" -r neuron.txt
    pip_install -r requirements.txt
    "$venv/bin/python" -m compileall -q "$venv/lib" >/dev/null || true # some packages have files for other versions
    printf '%s\n' "$wanted" >"$venv/.installed"
fi
cd "$work"
put 0644 /etc/profile.d/baretrain.sh <<EOF
export PATH=$venv/bin:\$PATH
EOF
