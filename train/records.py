"""The command `baretrain records`, which `train.tools.records` implements."""

from train.tools.records import main

if __name__ == "__main__":
    raise SystemExit(main())
