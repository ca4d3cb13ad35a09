#!/usr/bin/env bash
# The virtual environment /opt/baretrain/venv with our wheel and the packages whose sha256 came with it, and the compile
# cache if the build names one. Runs as root; a second run changes nothing. PIP_ARGS: more arguments for pip, as those
# of a mirror.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh
top=/opt/baretrain
venv=$top/venv
wheels=("$top"/dist/baretrain-*.whl)
[[ -f ${wheels[0]} && ${#wheels[@]} = 1 ]] || fail "$top/dist must hold one wheel of baretrain"
found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$found" = "$PYTHON" ] || fail "python3 is $found, and the packages were resolved for $PYTHON: take another base image"
cd "$top/dist"

# One index at a time and none of a configuration file; only what was resolved before the build, by its sha256. What has
# no wheel is built by the setuptools of that list: pip would load one of its own without a hash.
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
    "$venv/bin/python" -m compileall -q "$venv/lib" >/dev/null || true # some packages ship files of other Pythons
    printf '%s\n' "$wanted" >"$venv/.installed"
fi
cd "$work"
put 0644 /etc/profile.d/baretrain.sh <<EOF
export PATH=$venv/bin:\$PATH
EOF

if [ -n "$COMPILE_CACHE" ]; then
    "$venv/bin/python" -m ami restore "$COMPILE_CACHE" "$top/graphs"
    chmod -R u=rwX,go=rX "$top/graphs" # each user's cache begins with a copy: graphs are code
fi
