"""`python -m train.convert`; its code is in `train.tools.convert`."""

from train.tools.convert import main

if __name__ == "__main__":
    raise SystemExit(main())
