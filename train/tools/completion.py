"""Scripts of `baretrain --completion bash` and `zsh`, which complete commands, flags, settings, options and files.

The script has all words in its tables, since starting Python for each key press would take too long.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module

from train.config import BackendConfig, XLAConfig, check
from train.machine.console import say
from train.parallel.optim import SCHEDULES
from train.run.command import DONE, guarded
from train.run.help import groups, plain, walk
from train.run.names import SELECTORS
from train.tools.settings import commands, options

FLAG = re.compile(r"^ +(?:-\w(?: \w+)?, )?(--[\w-]+)", re.MULTILINE)
ACTIONS = re.compile(r"^  \{([\w,]+)\}", re.MULTILINE)  # such as {list,verify,export}
OF_A_RUN = ("finetune", "records", "evaluate", "predict", "doctor")  # have the settings of train
# What both shells do. `_baretrain_find TOKEN WORD...` sets `found` to the words that may replace the token, and `kept`
# to the part of the token that stays before a file name; it is empty if there are words.
COMMON = """
_baretrain_find() {
  local token=$1 command='' word rest
  shift
  for word in "$@"; do
    if [[ $word == -- ]]; then command=train  # launch ... -- settings of a run
    elif [[ -z $command && $word != -* ]]; then command=$word
    fi
  done
  found=() kept=''
  local words=(${=_baretrain_commands})
  if [[ $token == -*=* ]]; then words=() kept=${token%%=*}=
  elif [[ -n $command && $token == -* ]]; then words=(${=_baretrain_flags[$command]-})
  elif [[ -n $command && $token == *=* ]]; then
    words=() kept=${token%%=*}=
    for word in ${=_baretrain_values[${token%%=*}]-}; do words+=("$kept$word"); done
  elif [[ -n $command ]]; then words=(${=_baretrain_words[$command]-})
  fi
  local -A seen
  for word in "${words[@]}"; do
    [[ $word == "$token"* ]] || continue
    rest=${word#"$token"}
    # a section at a time: optim. before optim.lr=
    if [[ $token != *=* && $rest == *.* ]]; then word=$token${rest%%.*}.; fi
    if [[ -z ${seen[$word]-} ]]; then found+=("$word"); fi
    seen[$word]=1
  done
  if [[ -n "${found[*]}" ]]; then kept=''; fi
}
"""
BASH = (
    COMMON.replace("${=", "${")
    + r"""
_baretrain() {
  local found kept line=${COMP_LINE:0:COMP_POINT}
  local token=${line##*[[:space:]]}
  local -a before
  read -ra before <<< "${line%"$token"}"
  _baretrain_find "$token" "${before[@]:1}"
  COMPREPLY=()
  if (( ${#found[@]} == 0 )); then
    compopt -o filenames
    mapfile -t COMPREPLY < <(compgen -f -- "${token#"$kept"}")
    # readline replaces only what follows = and :
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$kept}")
    return
  fi
  COMPREPLY=("${found[@]}")
  [[ "${found[*]}" == *[=.] ]] && compopt -o nospace
  if [[ $token == *=* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${found[@]#"${token%%=*}="}")
  fi
}
complete -F _baretrain baretrain
"""
)
ZSH = (
    COMMON
    + r"""
_baretrain() {
  local -a found
  local kept
  _baretrain_find "$words[CURRENT]" "${(@)words[2,CURRENT-1]}"
  if (( $#found == 0 )); then
    compset -P "$kept"
    _files
    return
  fi
  local -a ended=(${(M)found:#*[=.]})
  (( $#ended )) && compadd -S '' -- $ended
  compadd -- ${found:#*[=.]}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _baretrain baretrain
"""
)
SHELLS = {"bash": BASH, "zsh": ZSH}


def main(arguments: Sequence[str]) -> int:
    def act() -> int:
        shell = " ".join(arguments)
        check(shell in SHELLS, f"--completion {shell}: it must be one of {', '.join(SHELLS)}")
        say(*script(shell).splitlines())
        return DONE

    return guarded(act)


def script(shell: str) -> str:
    """Return the script for a shell."""
    # By name, since the table of commands is above this package.
    every = import_module("train.__main__").COMMANDS
    tables: dict[str, dict[str, Iterable[str]]] = {"flags": {}, "words": {}, "values": values()}
    for command, (module, _) in every.items():
        text = help_of(module)
        actions = [word for found in ACTIONS.findall(text) for word in found.split(",")]
        tables["flags"][command] = FLAG.findall(text)
        schema = "train" if command in OF_A_RUN else command
        tables["words"][command] = [*actions, *(f"{key}=" for key in keys(schema))]
    lines = [
        f"# Completion of baretrain for {shell}, made by baretrain --completion {shell}.",
        f"_baretrain_commands='{' '.join(every)}'",
    ]
    for name, table in tables.items():
        lines += declared(name, table)
    return "\n".join(lines) + SHELLS[shell]


def declared(name: str, table: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the lines that declare a table of words."""
    rows = [f"[{key}]='{' '.join(words)}'" for key, words in table.items()]
    return [f"declare -gA _baretrain_{name}=(", *rows, ")"]


def help_of(module: str) -> str:
    """Return what a command's --help prints."""
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        import_module(module).main(["--help"])
    return printed.getvalue()


def keys(command: str) -> list[str]:
    """Return the groups and settings of a command with settings; [] for another command."""
    schema = commands().get(command)
    if schema is None:
        return []
    settings = [key for key, _, _ in walk(schema, options()) if "[]" not in key]
    sections = {key.rpartition(".")[0] for key in settings}
    plain_keys = set(settings) - sections - {*SELECTORS.values()}
    return sorted({*plain_keys, *groups(command)})


def values() -> dict[str, Iterable[str]]:
    """Return the possible values of groups and settings that have a list of them."""
    found: dict[str, Iterable[str]] = {
        "backend.precision": {*BackendConfig.precisions, *XLAConfig.precisions},
        "optim.schedule": SCHEDULES,
    }
    for command, schema in commands().items():
        for key, _, item in walk(schema, options()):
            among = item.metadata.get("among", ())
            if item.type in (bool, "bool"):
                among = (True, False)
            if among and "[]" not in key:
                found[key] = map(plain, among)
        for group, (_, names) in groups(command).items():
            found[group] = names
    return {key: sorted(words) for key, words in found.items()}
