"""The command `python -m train.bench`, which measures how fast a configuration trains on this machine."""
