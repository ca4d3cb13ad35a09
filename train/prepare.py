"""The command `baretrain prepare`, which `train.tools.prepare` implements."""

from train.tools.prepare import main

if __name__ == "__main__":
    raise SystemExit(main())
