"""The launcher, which starts runs on this machine, under Slurm, or on EC2."""

import train as train  # imported first, because it reports missing packages in one line
