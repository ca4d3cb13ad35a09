"""The command `baretrain report`, which `train.tools.report` implements."""

from train.tools.report import main

if __name__ == "__main__":
    raise SystemExit(main())
