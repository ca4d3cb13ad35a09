"""How fast a configuration trains on this machine: `python -m train.bench`."""
