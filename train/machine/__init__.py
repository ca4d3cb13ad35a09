"""The machine and this process: launcher, torchrun, memory, other processes, versions. Does not import torch."""
