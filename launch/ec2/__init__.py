"""Machines on EC2, which are made for a run and removed when it ends."""
