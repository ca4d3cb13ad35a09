"""`python -m train.report`; its code is in `train.tools.report`."""

from __future__ import annotations

import sys

from train.tools.report import main

if __name__ == "__main__":
    sys.exit(main())
