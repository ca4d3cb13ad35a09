"""`python -m train.doctor`; its code is in `train.tools.doctor.command`."""

from __future__ import annotations

import sys

from train.tools.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
