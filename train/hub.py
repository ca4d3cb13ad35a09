"""The command `baretrain hub`, which `train.tools.hub` implements."""

from train.tools.hub import main

if __name__ == "__main__":
    raise SystemExit(main())
