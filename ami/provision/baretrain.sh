#!/usr/bin/env bash
# The virtual environment /opt/baretrain/venv with our wheel, and the compile cache if the build names one. Runs as
# root; a second run changes nothing. PIP_ARGS: more arguments for pip, as those of a mirror.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=functions.sh
. /etc/baretrain/functions.sh
top=/opt/baretrain
venv=$top/venv
wheels=("$top"/dist/baretrain-*.whl)
[[ -f ${wheels[0]} && ${#wheels[@]} = 1 ]] || fail "$top/dist must hold one wheel of baretrain"

extras=report arguments=()
if [ "$IMAGE" = neuron ]; then
    extras=report,trn1
    arguments+=(--extra-index-url "$NEURON_INDEX")
fi
read -ra more <<<"${PIP_ARGS:-}"
arguments+=("${more[@]}" --constraint "$top/dist/constraints.txt" "${wheels[0]}[$extras]")

wanted=$( (cd "$top/dist" && sha256sum -- *.whl constraints.txt) && printf '%s\n' "${arguments[@]}")
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "${arguments[@]}"
    "$venv/bin/python" -m compileall -q "$venv/lib" >/dev/null || true # some packages ship files of other Pythons
    printf '%s\n' "$wanted" >"$venv/.installed"
fi
put 0644 /etc/profile.d/baretrain.sh <<EOF
export PATH=$venv/bin:\$PATH
EOF

if [ -n "$COMPILE_CACHE" ]; then
    "$venv/bin/python" -m ami restore "$COMPILE_CACHE" "$top/graphs"
    chmod -R u=rwX,go=rX "$top/graphs" # each user's cache begins with a copy: graphs are code
fi
