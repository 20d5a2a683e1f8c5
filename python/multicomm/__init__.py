"""multicomm: a torch.distributed backend for many overlapping process groups.

Importing the package registers the backend::

    import torch.distributed as dist, multicomm
    dist.init_process_group("multicomm")
    rows = dist.new_group([0, 1], backend="multicomm")
"""

from __future__ import annotations

from multicomm import _stack as _stack  # here, since a thread that reads stacks should import nothing
from multicomm._backend import _register, launched_by_mpi, start, stats

__version__ = "0.1.0"
__all__ = ["launched_by_mpi", "start", "stats"]

_register()
