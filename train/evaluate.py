"""`python -m train.evaluate`; its code is in `train.tools.evaluate`."""

from __future__ import annotations

import sys

from train.tools.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
