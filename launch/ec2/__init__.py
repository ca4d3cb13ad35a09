"""Machines of EC2: made for a run, and gone after it."""
