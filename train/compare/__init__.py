"""Runs the variants of a training run one after the other, and reports on them beside one another."""
