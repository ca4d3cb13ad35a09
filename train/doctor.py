"""The command `baretrain doctor`, which `train.tools.doctor` implements."""

import sys

from train.tools.doctor import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
