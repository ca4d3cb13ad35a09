"""The command `baretrain checkpoints`. Its code is in `train.tools.checkpoints`."""

from __future__ import annotations

import sys

from train.tools.checkpoints import main

if __name__ == "__main__":
    sys.exit(main())
