"""Writes docs/operations.md: which operations, dtypes and reduce ops work here and on Gloo, tried on two ranks, beside
what the sources of torch 2.13 say of its MPI and NCCL backends; and how exact half precision is.

    python benchmarks/operations.py docs/operations.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2
HALF_RANKS = 4
REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *WHOLE, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)

# ProcessGroupMPI.cpp (mpiDatatype, mpiOp; contiguous dense tensors only) and NCCLUtils / ProcessGroupNCCL.cpp
# (ncclDataType, getNcclReduceOp; complex tensors are summed as real ones by torch.distributed).
MPI_DTYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}
MPI_REDUCE_OPS = {"SUM", "PRODUCT", "MIN", "MAX"}
MPI_OPERATIONS = {
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *(
        "barrier",
        "send / recv",
        "recv from any rank",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "reduce_scatter",
    ),
}
NCCL_DTYPES = {
    *FLOATS,
    *(torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
NCCL_MISSING = {"recv from any rank", "monitored_barrier"}


def tensor(dtype: torch.dtype, size: int = 4) -> torch.Tensor:
    """Values that every dtype can add; read-only."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return torch.ones(size).to(dtype)
    return (torch.arange(size) % 2 + 1).to(dtype)


def reduce_op(name: str) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def operations(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """One call of each operation."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    a, many = tensor(dtype), tensor(dtype, 4 * RANKS)
    cpu = torch.device("cpu")

    def pieces() -> list[torch.Tensor]:
        return [tensor(dtype) for _ in range(RANKS)]

    def any_source() -> None:
        work = dist.isend(a, peer)
        dist.recv(tensor(dtype))
        if work is not None:
            work.wait()

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, a, peer), dist.P2POp(dist.irecv, a.clone(), peer)]):
            work.wait()

    def coalesced() -> None:
        with dist.distributed_c10d._coalescing_manager():
            for _ in range(3):
                dist.all_reduce(a.clone())

    def any_mixture() -> None:
        backend = dist.group.WORLD._get_backend(cpu)
        backend._start_coalescing()
        dist.all_reduce(a.clone())
        dist.broadcast(a.clone(), 0)
        backend._end_coalescing().wait()

    return {
        "all_reduce": lambda: dist.all_reduce(a.clone()),
        "broadcast": lambda: dist.broadcast(a.clone(), 0),
        "reduce": lambda: dist.reduce(a.clone(), 0),
        "all_gather": lambda: dist.all_gather(pieces(), a),
        "all_gather, uneven": lambda: dist.all_gather(
            [tensor(dtype, 3), tensor(dtype, 5)], tensor(dtype, 5 if rank else 3)
        ),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(many.clone(), a),
        "reduce_scatter": lambda: dist.reduce_scatter(a.clone(), pieces()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(a.clone(), many),
        "all_to_all": lambda: dist.all_to_all(pieces(), pieces()),
        "all_to_all_single": lambda: dist.all_to_all_single(many.clone(), many),
        "gather": lambda: dist.gather(a, pieces() if rank == 0 else None),
        "scatter": lambda: dist.scatter(a.clone(), pieces() if rank == 0 else None),
        "barrier": dist.barrier,
        "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=20)),
        "send / recv": lambda: dist.send(a, 1) if rank == 0 else dist.recv(a.clone(), 0),
        "recv from any rank": any_source,
        "batch_isend_irecv": exchange,
        "coalesced calls of one kind": coalesced,
        "coalesced calls of any kind": any_mixture,
    }


def attempt(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False
    return True


def everywhere(ok: bool) -> bool:
    """Whether it worked on all ranks; also keeps them in step."""
    answers: list[object] = [None] * RANKS
    dist.all_gather_object(answers, ok)
    return all(answers)


def half_errors() -> dict[str, float]:
    """Largest relative error of 100 000 sums and products over the ranks, in units of the last place."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        rows = [
            torch.randn(100_000, generator=torch.Generator().manual_seed(rank)).abs().to(dtype)
            for rank in range(HALF_RANKS)
        ]
        for op in ("SUM", "PRODUCT"):
            data = rows[dist.get_rank()].clone()
            dist.all_reduce(data, op=reduce_op(op))
            wide = torch.stack([row.double() for row in rows])
            want = wide.sum(0) if op == "SUM" else wide.prod(0)
            scale = want.abs().clamp(min=1e-4) * torch.finfo(dtype).eps
            found[f"{op} of {dtype}".replace("torch.", "")] = ((data.double() - want).abs() / scale).max().item()
    return found


def probe(backend: str, output: Path) -> None:
    """On every rank; the first one writes what works."""
    if backend == "multicomm":
        __import__("multicomm")
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    found = half_errors() if dist.get_world_size() == HALF_RANKS else what_works()
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def what_works() -> dict[str, object]:
    return {
        "operations": {name: everywhere(attempt(call)) for name, call in operations(torch.float32).items()},
        "moved": {str(d): everywhere(attempt(operations(d)["broadcast"])) for d in DTYPES},
        "reduced": {
            f"{d} {op}": everywhere(attempt(lambda d=d, op=op: dist.all_reduce(tensor(d), op=reduce_op(op))))
            for d in DTYPES
            for op in REDUCE_OPS
        },
        "special": {
            "sparse COO": everywhere(attempt(lambda: dist.all_reduce(torch.eye(3).to_sparse()))),
            "not contiguous": everywhere(_strided_is_right()),
        },
    }


def _strided_is_right() -> bool:
    data = torch.ones(6, 2)
    return attempt(lambda: dist.all_reduce(data[:, 0])) and data.sum().item() == 6 * RANKS + 6


def found_on(backend: str, ranks: int = RANKS) -> dict[str, dict[str, bool]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*launcher, __file__, backend, str(output)], check=True, env=environment, timeout=300)
        return json.loads(output.read_text())


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def mark(ok: bool) -> str:
    return "yes" if ok else "-"


def other_backends(operation: str) -> list[str]:
    return [mark(operation in MPI_OPERATIONS), mark(operation not in NCCL_MISSING)]


def page() -> Iterator[str]:
    ours, gloo = found_on("multicomm"), found_on("gloo")
    half, gloo_half = found_on("multicomm", HALF_RANKS), found_on("gloo", HALF_RANKS)
    yield "# Operations\n"
    yield (
        f"Tried on {RANKS} ranks with torch {torch.__version__} for multicomm and Gloo (`python "
        "benchmarks/operations.py docs/operations.md` writes this page); for torch's MPI and NCCL backends as their "
        "sources say. An attempt counts when it ends without an error on both ranks. The columns of multicomm, Gloo "
        "and MPI are about CPU tensors, NCCL's about CUDA tensors; [cuda.md](cuda.md) is about multicomm's.\n"
    )
    yield from table(
        ["operation", "multicomm", "Gloo", "MPI", "NCCL"],
        [
            [
                name,
                mark(ok),
                mark(gloo["operations"][name]),
                mark(name in MPI_OPERATIONS),
                mark(name not in NCCL_MISSING),
            ]
            for name, ok in ours["operations"].items()
        ]
        + [
            [
                "all_reduce, sparse COO",
                mark(ours["special"]["sparse COO"]),
                mark(gloo["special"]["sparse COO"]),
                "-",
                "-",
            ],
            ["all_reduce, not contiguous", *(mark(b["special"]["not contiguous"]) for b in (ours, gloo)), "-", "-"],
        ],
    )
    yield "\n## Dtypes\n"
    yield (
        "What can be moved (broadcast, all_gather, all_to_all, gather, scatter, messages), and by which reduce ops it "
        "can be reduced (all_reduce, reduce, reduce_scatter). torch.distributed itself turns complex tensors into real "
        "ones, and refuses what that does not allow.\n"
    )
    rows = []
    for dtype in DTYPES:
        cells = [str(dtype).removeprefix("torch.")]
        for backend in (ours, gloo):
            reduced = [op for op in REDUCE_OPS if backend["reduced"][f"{dtype} {op}"]]
            cells.append(("moved; " if backend["moved"][str(dtype)] else "") + (", ".join(reduced) or "-"))
        complex_ = dtype.is_complex
        in_mpi, in_nccl = dtype in MPI_DTYPES, dtype in NCCL_DTYPES or complex_
        cells.append("moved; " + ", ".join(op for op in REDUCE_OPS if op in MPI_REDUCE_OPS) if in_mpi else "-")
        nccl = [op for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") if not complex_ or op in ("SUM", "AVG")]
        if dtype == torch.bool:
            nccl.remove("AVG")
        if dtype in FLOATS:
            nccl.append("PREMUL_SUM")
        cells.append("moved; " + ", ".join(nccl) if in_nccl else "-")
        rows.append(cells)
    yield from table(["dtype", "multicomm", "Gloo", "MPI", "NCCL"], rows)
    yield """
- AVG of whole numbers: the sum (which wraps) divided by the number of ranks, rounded towards zero, as NCCL does.
- bool: SUM and MAX are "or", PRODUCT and MIN are "and".
- PREMUL_SUM (`torch.distributed._make_nccl_premul_sum`): each rank's own factor, a number or a tensor of one element,
  applied to a copy of its input in the tensor's dtype; whole numbers take whole factors.
- Quantised, sparse CSR and nested tensors are refused by torch.distributed before they reach a backend; their parts can
  be sent.
- Expanded tensors (elements that share memory) are read as inputs, and refused where a result would be written.
"""
    yield "## Half precision\n"
    yield (
        f"Largest error of 100 000 sums and products of positive numbers of {HALF_RANKS} ranks against float64, in "
        "units of the last place. multicomm reduces in float32 and rounds once, whatever the number of ranks; half a "
        "unit is the best there is.\n"
    )
    yield from table(
        ["", "multicomm", "Gloo"],
        [[name, f"{error:.2f}", f"{gloo_half[name]:.2f}"] for name, error in half.items()],
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text("\n".join(page()) + "\n")
    else:
        probe(sys.argv[1], Path(sys.argv[2]))
