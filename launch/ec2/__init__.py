"""Machines of EC2: made for a run, and removed after it."""
