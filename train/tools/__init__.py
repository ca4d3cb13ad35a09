"""The commands beside training. Their entry points stand in `train/`."""
