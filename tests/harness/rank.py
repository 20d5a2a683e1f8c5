"""What a test body gets: who it is, its pool's groups, and a channel apart from the backend under test."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

_SIDE_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Group:
    """A process group and its members' global ranks, in group order."""

    kind: str
    ranks: tuple[int, ...]
    handle: dist.ProcessGroup
    own: int
    """This process's rank in the group; -1 for a non-member."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def neighbour(self, step: int) -> int:
        """The global rank `step` places further round the group."""
        return self.ranks[(self.own + step) % self.size]


def group_plan(world: int) -> dict[str, list[int]]:
    """The groups that every pool has, beside the world."""
    everybody = list(range(world))
    plan = {"single": [world - 1], "twin_a": everybody, "twin_b": everybody}
    if world >= 2:
        plan["pair"] = [world - 2, world - 1]
        plan["unsorted"] = {2: [1, 0], 3: [2, 0]}.get(world, [2, 0, world - 1])
    if world >= 3:  # neighbours round a ring: each shares one rank with the next, and the last with the first
        plan |= {f"ring_{i}": sorted((i, (i + 1) % world)) for i in everybody}
    return plan


def ordered_group(ranks: list[int], backend: str | None = None) -> dist.ProcessGroup:
    """`dist.new_group` that keeps the order of `ranks` (the public one sorts them)."""
    return dist.distributed_c10d._new_group_with_tag(ranks, backend=backend, sort_ranks=False)


@dataclass
class Rank:
    """One rank of a pool, handed to every test body."""

    rank: int
    world: int
    backend: str
    store: dist.Store
    """Hosted by pytest, apart from the backend under test; a prefix per test."""
    groups: dict[str, Group] = field(default_factory=dict)
    seed: int = 0
    random: random.Random = field(default_factory=random.Random)
    """Seeded alike on every rank."""

    def make_groups(self) -> None:
        """Makes the pool's groups; called once, by every rank."""
        self.groups["world"] = Group("world", tuple(range(self.world)), dist.group.WORLD, self.rank)
        for kind, ranks in group_plan(self.world).items():
            own = ranks.index(self.rank) if self.rank in ranks else -1
            self.groups[kind] = Group(kind, tuple(ranks), ordered_group(ranks), own)

    def begin(self, test: int, seed: int, store: dist.Store) -> None:
        """Starts a test: its own keys in the store, and its seed."""
        self.store = dist.PrefixStore(f"test{test}", store)
        self.seed = seed
        self.random = random.Random(seed)
        torch.manual_seed(seed)

    def joined(self, *kinds: str) -> Iterator[Group]:
        """This rank's groups (of these kinds, or all), in one order on all ranks."""
        for kind, group in self.groups.items():
            if group.own >= 0 and (not kinds or kind.split("_")[0] in kinds or kind in kinds):
                yield group

    def signal(self, event: str) -> None:
        """Tells the other ranks that `event` has happened."""
        self.store.set(event, "1")
        self.store.get(event)  # set() does not wait for the server: from here on every rank sees it

    def await_signal(self, event: str) -> None:
        """Waits until some rank has signalled `event`."""
        self.store.wait([event], _SIDE_TIMEOUT)

    def meet(self, place: str) -> None:
        """A barrier of the world through the store."""
        self.signal(f"{place}/{self.rank}")
        self.store.wait([f"{place}/{rank}" for rank in range(self.world)], _SIDE_TIMEOUT)
