"""`python -m train.prepare`; its code is in `train.tools.prepare`."""

from train.tools.prepare import main

if __name__ == "__main__":
    raise SystemExit(main())
