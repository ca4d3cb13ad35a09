"""`python -m train.doctor`; its code is in `train.tools.doctor.command`."""

from train.tools.doctor.command import main

if __name__ == "__main__":
    raise SystemExit(main())
