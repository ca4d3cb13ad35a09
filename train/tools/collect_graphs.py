"""The command `python -m train.tools.collect_graphs key=value ...`, which `baretrain precompile` starts under torchrun.

It runs each graph once, does not check the results, and saves nothing. It is a separate command, not a setting of
`train`, so that nobody trains a model in this way by mistake.
"""

from __future__ import annotations

import sys

from train.machine.torchrun import die_with_torchrun


def main() -> int:
    die_with_torchrun()
    from train import entry  # imported here for the same reason as in train/__main__.py

    return entry.run_command_line(sys.argv[1:], collects=True)


if __name__ == "__main__":
    sys.exit(main())
