"""`python -m train.hub`; its code is in `train.tools.hub`."""

from __future__ import annotations

import sys

from train.tools.hub import main

if __name__ == "__main__":
    sys.exit(main())
