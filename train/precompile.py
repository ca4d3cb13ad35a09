"""`python -m train.precompile`; its code is in `train.tools.precompile`."""

from __future__ import annotations

import sys

from train.tools.precompile import main

if __name__ == "__main__":
    sys.exit(main())
