"""The package of `python -m train.bench`, which measures a configuration's training speed on this machine."""
