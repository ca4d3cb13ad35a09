"""`python -m train.precompile`; its code is in `train.tools.precompile`."""

from train.tools.precompile import main

if __name__ == "__main__":
    raise SystemExit(main())
