"""The commands other than training. Their entry points are in `train/`."""
