"""`python -m train.predict`; its code is in `train.tools.predict`."""

from __future__ import annotations

import sys

from train.tools.predict import main

if __name__ == "__main__":
    sys.exit(main())
