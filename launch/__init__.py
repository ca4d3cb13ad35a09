"""Launching runs: local, Slurm, EC2. Nothing is built here yet; start runs with torchrun."""
