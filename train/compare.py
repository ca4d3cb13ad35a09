"""`python -m train.compare`; its code is in `train.tools.compare`."""

from __future__ import annotations

import sys

from train.tools.compare import main

if __name__ == "__main__":
    sys.exit(main())
