"""`python -m train.compare`; its code is in `train.tools.compare`."""

from train.tools.compare import main

if __name__ == "__main__":
    raise SystemExit(main())
