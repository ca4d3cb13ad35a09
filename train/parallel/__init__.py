"""Devices, the ways to split a model over ranks, and optimizers."""
