"""`python -m train.evaluate`; its code is in `train.tools.evaluate`."""

from train.tools.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
