"""baretrain: the training side. Start at `train/loop.py`."""

__version__ = "0.1.0"
