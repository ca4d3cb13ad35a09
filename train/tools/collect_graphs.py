"""`python -m train.tools.collect_graphs key=value ...`: the short run of `train.precompile`, started under torchrun.

Each graph runs once, no number is checked and nothing is saved. No setting turns a run into this: a run with such a
setting by mistake would train for nothing.
"""

from __future__ import annotations

import sys

from train.system.console import use_console
from train.system.torchrun import die_with_torchrun


def main() -> int:
    die_with_torchrun()
    use_console("stderr")
    from train import entry  # late, as in train/__main__.py

    return entry.run_command_line(collects=True)


if __name__ == "__main__":
    sys.exit(main())
