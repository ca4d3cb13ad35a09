"""`python -m train.prepare`; its code is in `train.tools.prepare`."""

from __future__ import annotations

import sys

from train.tools.prepare import main

if __name__ == "__main__":
    sys.exit(main())
