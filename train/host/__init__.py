"""This process and its machine: launcher, environment, devices, memory. No torch here."""
