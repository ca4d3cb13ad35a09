"""The command `baretrain evaluate`, which `train.tools.evaluate` implements."""

from train.tools.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
