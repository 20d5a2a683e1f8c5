"""Which checks run, in which jobs, in which order: the most telling first, since time may run out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """One start of torchrun; `checks` run in turn in each rank."""

    name: str
    ranks: int
    checks: tuple[str, ...]
    limit: float  # seconds, whatever the checks are
    own: bool = False  # a device for each rank; else all share the first
    leave: bool = False  # without destroy_process_group()
    dies: tuple[int, ...] = ()  # ranks that its last check kills
    environment: dict[str, str] = field(default_factory=dict)


def checks(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


MATRIX = checks("collectives", "reductions", "movements", "shapes", "refusals", "asynchronous", "coalesced", "fused")
STREAMS = checks(
    "streams",
    "producer_and_consumer",
    "submitted_before_it_is_written",
    "pipelines",
    "dropped_at_once",
    "dropped_results",
    "busy_allocator",
    "futures",
)
NCCL, STAGED = {"MULTICOMM_CUDA": "nccl"}, {"MULTICOMM_CUDA": "staged"}
# Chunks of the size that is the default would not be several on the double's small tensors.
SMALL_CHUNKS = {"MULTICOMM_STAGING_BYTES": "65536"}


def all_jobs(devices: int, double: bool) -> list[Job]:
    several = min(devices, 3 if double else 8)
    jobs = [
        Job("one", 1, ("info.everything",), 60, environment=NCCL),
        Job("one-collectives", 1, MATRIX, 90, environment=NCCL),
        Job("one-streams", 1, (*STREAMS, "streams.high_level_hooks"), 90, environment=NCCL),
        Job(
            "shared",
            2,
            (
                *checks("collectives", "says_that_it_is_slow"),
                *MATRIX,
                *checks("collectives", "messages", "large", "both_kinds"),
                "errors.mismatch",
                "training.ddp",
            ),
            120,
        ),
    ]
    if several >= 2:
        jobs += [
            Job(
                "several",
                several,
                (
                    *MATRIX,
                    *checks("collectives", "messages", "large", "both_kinds"),
                    *checks("several", "opposite_order", "rings", "equals_nccl"),
                    "errors.mismatch",
                    *checks("training", "ddp", "ddp_on_halves", "fsdp_on_halves"),
                ),
                150,
                own=True,
                environment=NCCL,
            ),
            Job("several-killed", several, ("errors.killed_on_the_device",), 60, own=True, dies=(1,), environment=NCCL),
        ]
    jobs += [
        Job("shared-killed", 3, ("errors.killed",), 60, dies=(1,), environment=STAGED),
        Job("one-graphs", 1, ("capture.beside_communication",), 60, environment=NCCL),
        Job("one-graphs-refused", 1, checks("capture", "refused", "wait_refused"), 60, environment=NCCL),
        Job("shared-streams", 2, STREAMS, 90, environment=STAGED),
        Job("one-abort", 1, ("errors.abort_on_the_device",), 60, environment=NCCL),
        Job(
            "shared-errors",
            2,
            checks("errors", "mismatch_in_flight", "timeout", "abort_with_work_pending", "abort_on_the_device"),
            90,
            environment=STAGED,
        ),
        Job("one-leaves", 1, ("errors.leaves_quietly",), 60, leave=True, environment=NCCL),
        Job("shared-leaves", 2, ("errors.leaves_quietly",), 60, leave=True, environment=STAGED),
        Job("one-memory", 1, checks("memory", "stays", "groups_come_and_go"), 90, environment=NCCL),
        Job(
            "four-shared",
            4,
            (
                *checks("collectives", "reductions", "movements", "messages", "large"),
                "several.opposite_order",
                *checks("training", "ddp", "ddp_on_halves"),
            ),
            120,
            environment=STAGED | SMALL_CHUNKS,
        ),
        Job("shared-memory", 2, ("memory.stays",), 120, environment=STAGED),
    ]
    if several >= 2:
        jobs += [
            Job("several-streams", several, STREAMS, 90, own=True, environment=NCCL),
            Job(
                "several-errors",
                several,
                checks("errors", "mismatch_in_flight", "timeout", "abort_with_work_pending", "abort_on_the_device"),
                90,
                own=True,
                environment=NCCL,
            ),
            Job("several-leaves", several, ("errors.leaves_quietly",), 60, own=True, leave=True, environment=NCCL),
            Job("several-mixed", several, checks("collectives", "refusals", "messages"), 60, own=True),
        ]
    return jobs


def chosen(jobs: list[Job], wanted: Callable[[str], bool]) -> list[Job]:
    """Those with a wanted name, whole; of others the wanted checks."""
    kept = []
    for job in jobs:
        some = job.checks if wanted(job.name) else tuple(check for check in job.checks if wanted(check))
        if some:
            kept.append(Job(**{**job.__dict__, "checks": some}))
    return kept
