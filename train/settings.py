"""The command `baretrain settings`, which `train.tools.settings` implements."""

from train.tools.settings import main

if __name__ == "__main__":
    raise SystemExit(main())
