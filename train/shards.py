"""`python -m train.shards`; its code is in `train.tools.shards`."""

from __future__ import annotations

import sys

from train.tools.shards import main

if __name__ == "__main__":
    sys.exit(main())
