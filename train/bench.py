"""`python -m train.bench`; its code is in `train.tools.bench.command`."""

from __future__ import annotations

import sys

from train.tools.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
