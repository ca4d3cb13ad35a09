"""The command `baretrain precompile`, which `train.tools.precompile` implements."""

from train.tools.precompile import main

if __name__ == "__main__":
    raise SystemExit(main())
