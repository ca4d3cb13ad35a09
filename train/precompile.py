"""The command `baretrain precompile`, which `train.tools.precompile` implements."""

import sys

from train.tools.precompile import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
