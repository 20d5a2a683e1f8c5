"""Starts and stops this rank's timeline (csrc/timeline); ``python -m multicomm timeline`` puts the ranks together."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from multicomm import _C
from multicomm._backend import _place_in_world


def start_timeline(folder: str | os.PathLike[str]) -> Path:
    """Begins to record what this rank's operations do, as a Chrome trace; each rank has a file of its own.

    The environment variable ``MULTICOMM_TIMELINE=FOLDER`` does the same from the first group on. Ranks may start and
    stop when they like; a file that is there already is replaced. What is on disk is valid at every moment.

    Args:
        folder: where the file is written; made if need be.

    Returns:
        The file, ``folder/rank<RANK>.json``.
    """
    if not dist.is_initialized():
        raise RuntimeError("multicomm.start_timeline: call torch.distributed.init_process_group first")
    return Path(_C.start_timeline(os.fspath(folder), *_place_in_world()))


def stop_timeline() -> None:
    """Ends this rank's timeline and completes its file; operations under way are recorded as unfinished.

    Does nothing where none is being recorded. The end of the process does the same.
    """
    _C.stop_timeline()
