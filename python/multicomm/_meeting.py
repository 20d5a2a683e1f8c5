"""Ranks wait for each other in torch's store: with a deadline, and with the names of those that do not come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_LOOK = timedelta(seconds=1)  # a wait in the store cannot be interrupted
_COMPLETE = "complete"


def meet(what: str, key: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
    """Returns when all `ranks` are here, or raises on each that comes, also on those that come later.

    What MPI does together has no deadline and no way back, so ranks enter it only when all are known to be there. It is
    decided once whether all have come: no rank goes on where another has given up.

    Raises:
        torch.distributed.DistBackendError: they have not come within `timeout`; the text names the missing.
    """
    default: dist.Store = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"multicomm/communicators/{key}", default.clone())  # others use torch's own connection
    store.set(f"here/{rank}", "")
    if store.add("arrived", 1) == len(ranks) and store.add("settled", 1) == 1:
        store.set("outcome", _COMPLETE)
    deadline = time.monotonic() + timeout.total_seconds()
    while not _is_there(store, "outcome", _LOOK):
        if time.monotonic() < deadline:
            continue
        if store.add("settled", 1) == 1:
            missing = [other for other in ranks if not store.check([f"here/{other}"])]
            who = f"{name_ranks(missing)} did not come" if missing else "not every rank came"
            store.set("outcome", f"{who} within {timeout.total_seconds():g} s")
        deadline = time.monotonic() + _LOOK.total_seconds()  # somebody else has settled it and is about to say how
    outcome = store.get("outcome").decode()
    if outcome != _COMPLETE:
        raise dist.DistBackendError(f"{what}: given up, since {outcome}")


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_there(store: dist.Store, key: str, patience: timedelta) -> bool:
    try:
        store.wait([key], patience)
    except dist.DistStoreError:
        return False
    return True
