"""`python -m train.hub`; its code is in `train.tools.hub`."""

from train.tools.hub import main

if __name__ == "__main__":
    raise SystemExit(main())
