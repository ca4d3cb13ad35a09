"""`python -m train.records`; its code is in `train.tools.records`."""

from __future__ import annotations

import sys

from train.tools.records import main

if __name__ == "__main__":
    sys.exit(main())
