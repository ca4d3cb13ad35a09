"""A rank of a test, on a machine with fewer GPUs than the test has ranks: torchrun sharing_gpus.py PROGRAM ...

NCCL rejects two ranks on one GPU of one machine. So each calls itself a machine, and they talk over the loopback.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)

from train.parallel import ddp  # noqa: E402  of the tree that the program belongs to

pick = ddp.pick_device
count = torch.cuda.device_count()
# a test may change them later
rank, num_ranks = (
    int(os.environ["LOCAL_RANK"]),
    int(os.environ["LOCAL_WORLD_SIZE"]),
)
ddp.pick_device = lambda name, *_: pick(name, rank % count, min(num_ranks, count))
if count < num_ranks:
    os.environ |= {"NCCL_HOSTID": str(rank // count), "NCCL_SOCKET_IFNAME": "lo"}
runpy.run_path(sys.argv[0], run_name="__main__")
