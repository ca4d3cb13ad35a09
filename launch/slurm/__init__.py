"""Runs under Slurm."""
