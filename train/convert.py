"""The command `python -m train.convert`, which `train.tools.convert` implements."""

from train.tools.convert import main

if __name__ == "__main__":
    raise SystemExit(main())
