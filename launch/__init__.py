"""Launching runs: local, Slurm, EC2."""

import train as train  # first: it reports if this Python lacks something
