"""The command `python -m train key=value ...`, which trains one run, with or without torchrun."""

from __future__ import annotations

import sys

from train.machine.torchrun import die_with_torchrun


def main() -> int:
    die_with_torchrun()
    # imported late: this takes seconds, and the rank must already end if torchrun does
    from train import (
        entry,
    )
    from train.observe.trackers import unended

    code = entry.run_command_line()
    if unended:
        entry.leave_at_once(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
