"""`python -m train.bench`; its code is in `train.tools.bench.command`."""

from train.tools.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
