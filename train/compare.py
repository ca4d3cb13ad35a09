"""The command `baretrain compare`, which `train.tools.compare` implements."""

from train.tools.compare import main

if __name__ == "__main__":
    raise SystemExit(main())
