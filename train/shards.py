"""The command `baretrain shards`, which `train.tools.shards` implements."""

from train.tools.shards import main

if __name__ == "__main__":
    raise SystemExit(main())
