"""What the ranks have passed to init() is compared over MPI, before any group is made."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from typing import TYPE_CHECKING

from multicomm._meeting import name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from multicomm._mpi import Members

_MOST_SHOWN = 16  # members of a communicator in a text
_RULE = (
    "Every member of a communicator passes it, and as often as the others do; a rank passes only communicators that it "
    "belongs to. No group was made, and multicomm.init() can be called again."
)


def agree(everybody: MPI.Intracomm, mine: list[Members | None], wrong: Exception | None) -> list[int | None]:
    """Numbers of this rank's communicators among those of all ranks; raises on every rank where the lists do not fit.

    Only digests travel as long as all is well: of many ranks the lists themselves would be much.
    """
    keys = [None if members is None else digest(members) for members in mine]
    table: list[list[bytes | None]] = everybody.allgather(keys)
    counts = [Counter(row) for row in table]
    fits = all(
        counts[member][key] == counts[everybody.Get_rank()][key]
        for members, key in zip(mine, keys, strict=True)
        for member in members or ()
    )
    verdicts = everybody.allgather(None if fits and wrong is None else str(wrong or ""))
    complaints = [text for text in verdicts if text]
    if complaints:
        if wrong is not None:
            raise type(wrong)(f"multicomm.init(): {wrong}. {_RULE}") from None
        raise ValueError("multicomm.init(): what was passed cannot be used: " + "; ".join([*complaints, _RULE]))
    if any(text is not None for text in verdicts):
        raise ValueError(_difference(everybody.allgather([members for members in mine if members is not None])))
    numbers: dict[tuple[bytes, int], int] = {}
    own: list[int | None] = []
    for rank, row in enumerate(table):
        seen: Counter[bytes] = Counter()
        for key in row:
            number = None
            if key is not None:
                number = numbers.setdefault((key, seen[key]), len(numbers))
                seen[key] += 1
            if rank == everybody.Get_rank():
                own.append(number)
    return own


def _difference(table: list[list[Members]]) -> str:
    """What does not fit, and who passed what, the same on all ranks."""
    lines = ["multicomm.init(): the ranks do not pass the same communicators:"]
    counts = [Counter(row) for row in table]
    for members in dict.fromkeys(itertools.chain.from_iterable(table)):
        by_count: dict[int, list[int]] = {}
        for member in members:
            by_count.setdefault(counts[member][members], []).append(member)
        if len(by_count) > 1:
            said = (f"{_times(count)} by {name_ranks(sorted(ranks))}" for count, ranks in sorted(by_count.items()))
            lines.append(f"  {_show(members)} is passed {', '.join(said)}")
    lines.append("what each rank passes, as ranks of the world in the communicator's order:")
    alike: dict[tuple[Members, ...], list[int]] = {}
    for rank, row in enumerate(table):
        alike.setdefault(tuple(row), []).append(rank)
    lines += [f"  {name_ranks(ranks)}: {', '.join(map(_show, row)) or 'none'}" for row, ranks in alike.items()]
    return "\n".join([*lines, _RULE])


def _times(count: int) -> str:
    return {0: "not", 1: "once"}.get(count, f"{count} times")


def _show(members: Members) -> str:
    if len(members) <= _MOST_SHOWN:
        return str(list(members))
    first, last = ", ".join(map(str, members[: _MOST_SHOWN - 2])), members[-1]
    return f"[{first}, ..., {last}] ({len(members)} ranks)"


def digest(members: Members) -> bytes:
    return hashlib.sha256(repr(members).encode()).digest()[:16]
