"""`python -m train.shards`; its code is in `train.tools.shards`."""

from train.tools.shards import main

if __name__ == "__main__":
    raise SystemExit(main())
