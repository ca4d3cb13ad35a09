"""`python -m train.convert`; its code is in `train.tools.convert`."""

from __future__ import annotations

import sys

from train.tools.convert import main

if __name__ == "__main__":
    sys.exit(main())
