"""`python -m train.records`; its code is in `train.tools.records`."""

from train.tools.records import main

if __name__ == "__main__":
    raise SystemExit(main())
