"""`python -m train.report`; its code is in `train.tools.report`."""

from train.tools.report import main

if __name__ == "__main__":
    raise SystemExit(main())
