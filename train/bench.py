"""The command `baretrain bench`, which `train.tools.bench.command` implements."""

from train.tools.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
