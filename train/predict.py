"""The command `baretrain predict`, which `train.tools.predict` implements."""

from train.tools.predict import main

if __name__ == "__main__":
    raise SystemExit(main())
