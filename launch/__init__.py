"""Launching runs: local, Slurm, EC2."""

import train as train  # before all else: it reports what this Python lacks
