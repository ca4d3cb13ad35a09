"""`python -m train.predict`; its code is in `train.tools.predict`."""

from train.tools.predict import main

if __name__ == "__main__":
    raise SystemExit(main())
