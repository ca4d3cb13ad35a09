"""`python -m train.settings`; its code is in `train.tools.settings`."""

from __future__ import annotations

import sys

from train.tools.settings import main

if __name__ == "__main__":
    sys.exit(main())
