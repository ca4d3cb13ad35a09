"""The launcher of runs: on this machine, under Slurm and on EC2."""

import train as train  # imported first, since it reports what this Python lacks
