"""What pytest and a rank say to each other, pickled over one pipe per rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """pytest to rank: run the body of a test. `None` instead of a task ends the rank."""

    module: str
    function: str
    arguments: dict[str, Any]
    number: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Rank to pytest: how it went. Also sent once after start-up and once after the clean end."""

    traceback: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.traceback is None
