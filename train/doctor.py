"""The command `baretrain doctor`, which `train.tools.doctor.command` implements."""

from train.tools.doctor.command import main

if __name__ == "__main__":
    raise SystemExit(main())
