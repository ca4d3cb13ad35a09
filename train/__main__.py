"""`python -m train key=value ...`, alone or under torchrun: one training run."""

from __future__ import annotations

import sys

from train.console import use_console
from train.launcher import die_with_launcher


def main() -> int:
    die_with_launcher()
    use_console("stderr")
    from train.attempt import attempt  # seconds: by now torchrun's end, or a full disk, cannot leave it behind

    return attempt()


if __name__ == "__main__":
    sys.exit(main())
