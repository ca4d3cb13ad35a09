"""The measurement of a configuration's training speed on this machine: `python -m train.bench`."""
