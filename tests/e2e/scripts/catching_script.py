"""The job of the fault tests, in a script that catches what its training raises, and then waits
for the other ranks."""

import traceback

import torch.distributed as dist

from tmd.campaign.job import main

if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        dist.barrier()
