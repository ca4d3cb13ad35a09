"""`python -m train.settings`; its code is in `train.tools.settings`."""

from train.tools.settings import main

if __name__ == "__main__":
    raise SystemExit(main())
