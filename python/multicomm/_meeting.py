"""Ranks wait for each other in torch's store: with a deadline, and with the names of those that do not come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_FIRST_NAP = 0.001
_LONGEST_NAP = 0.05
_NAP_PER_RANK = 20e-6  # the store answers all ranks' looks
_SETTLING_SECONDS = 5.0  # a rank that settles it may die before it says how
_COMPLETE = "complete"


def meet(what: str, key: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
    """Returns when all `ranks` are here, or raises on each that comes, also on those that come later.

    What MPI does together has no deadline and no way back, so ranks enter it only when all are known to be there. It is
    decided once whether all have come: no rank goes on where another has given up.

    Raises:
        torch.distributed.DistBackendError: they have not come within `timeout`; the text names the missing.
    """
    store = dist.PrefixStore(f"multicomm/communicators/{key}", dist.distributed_c10d._get_default_store())
    store.set(f"here/{rank}", "")
    if store.add("arrived", 1) == len(ranks) and store.add("settled", 1) == 1:
        store.set("outcome", _COMPLETE)
    deadline = time.monotonic() + timeout.total_seconds()
    settling = False
    nap = _FIRST_NAP
    # Short looks: a wait in the store would keep the connection from this process's other threads, and hold up Ctrl-C.
    while not store.check(["outcome"]):
        if time.monotonic() >= deadline and not settling:
            settling = True
            if store.add("settled", 1) == 1:  # else another rank is about to say how
                missing = [other for other in ranks if not store.check([f"here/{other}"])]
                who = f"{name_ranks(missing)} did not come" if missing else "not every rank came"
                store.set("outcome", f"{who} within {timeout.total_seconds():g} s")
        if time.monotonic() >= deadline + _SETTLING_SECONDS:
            raise dist.DistBackendError(f"{what}: given up, since a rank has ended while the ranks met")
        time.sleep(nap)
        nap = min(1.5 * nap, max(_LONGEST_NAP, len(ranks) * _NAP_PER_RANK))
    outcome = store.get("outcome").decode()
    if outcome != _COMPLETE:
        raise dist.DistBackendError(f"{what}: given up, since {outcome}")


def name_ranks(ranks: Sequence[int]) -> str:
    """As "rank 3" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
