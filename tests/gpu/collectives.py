"""Every collective and message between devices, by dtype, against plain computation on the CPU.

Never run on real hardware so far: only with GPU_DOUBLE=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rank import Here, SkipCheck
from torch import Tensor

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIGNED = (torch.int32, torch.int64, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
NCCL_LACKS = (torch.int16, torch.uint16)
MOVED_ONLY = (torch.float8_e4m3fn, torch.float8_e5m2)
ARITHMETIC = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
BITS = (Op.BAND, Op.BOR, Op.BXOR)
ALL = (*FLOATS, *SIGNED, torch.bool, *COMPLEX, *NCCL_LACKS, *MOVED_ONLY)
COUNT = 37
Group = object


def wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What a rank brings: small, so that sums and products are exact in every dtype. In the wide dtype."""
    numbers = (torch.arange(count) * 7 + rank * 3 + rank * rank + salt) % 3 + 1
    if dtype == torch.bool:
        return numbers % 2
    return torch.complex(numbers.double(), numbers.double() - 2) if dtype.is_complex else numbers.to(wide(dtype))


def put(here: Here, data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.to(dtype).to(here.device)


def mine(here: Here, count: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    return put(here, values(here.rank, count, dtype, salt), dtype)


def reduced(op: object, dtype: torch.dtype, ranks: range, count: int, salt: int = 0) -> Tensor:
    """In the wide dtype."""
    all_of_them = torch.stack([values(rank, count, dtype, salt) for rank in ranks])
    if dtype == torch.bool:
        if op == Op.BXOR:
            return all_of_them.sum(0) % 2
        either = op in (Op.SUM, Op.MAX, Op.BOR)
        return all_of_them.amax(0) if either else all_of_them.amin(0)
    if op == Op.AVG:
        total = all_of_them.sum(0)
        floating = dtype.is_floating_point or dtype.is_complex
        return total / len(ranks) if floating else torch.div(total, len(ranks), rounding_mode="trunc")
    if op in BITS:
        result = all_of_them[0]
        for other in all_of_them[1:]:
            result = result & other if op == Op.BAND else result | other if op == Op.BOR else result ^ other
        return result
    reduce: Callable[..., Tensor] = {
        Op.SUM: Tensor.sum,
        Op.PRODUCT: Tensor.prod,
        Op.MIN: Tensor.amin,
        Op.MAX: Tensor.amax,
    }[op]
    return reduce(all_of_them, 0)


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    found = actual.detach().cpu()
    dtype, found = found.dtype, found.to(expected.dtype).reshape(-1)
    expected = expected.reshape(-1)
    narrow = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12, torch.complex128: 1e-12}
    tolerance = narrow.get(dtype, 1e-5)
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: {found.shape[0]} elements, not {expected.shape[0]}")
    exact = not (dtype.is_floating_point or dtype.is_complex)
    wrong = found != expected if exact else (found - expected).abs() > tolerance * (1 + expected.abs())
    if not exact:
        wrong |= found.abs().isnan()
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {found.numel()} elements are wrong; element {at} is {found[at]}, "
            f"not {expected[at]}"
        )


def operators(here: Here, dtype: torch.dtype) -> tuple[object, ...]:
    """By which a dtype can be reduced; with MULTICOMM_CUDA=nccl, by NCCL."""
    if dtype in MOVED_ONLY or (here.mode == "nccl" and dtype in NCCL_LACKS):
        return ()
    if dtype.is_complex:
        return (Op.SUM, Op.AVG)
    if dtype.is_floating_point:
        return ARITHMETIC
    arithmetic = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX) if dtype == torch.bool else ARITHMETIC
    return arithmetic if here.mode == "nccl" else (*arithmetic, *BITS)


def reductions(here: Here) -> str:
    """all_reduce, reduce and reduce_scatter: all dtypes, all operators."""
    n, all_ranks, done = here.size, range(here.size), 0
    for dtype in ALL:
        for op in operators(here, dtype):
            what = f"{op} of {dtype}"
            data = mine(here, COUNT, dtype)
            dist.all_reduce(data, op=op)
            same(data, reduced(op, dtype, all_ranks, COUNT), f"all_reduce {what}")
            root = (done + 1) % n
            data = mine(here, COUNT, dtype, 1)
            dist.reduce(data, root, op=op)
            if here.rank == root:
                same(data, reduced(op, dtype, all_ranks, COUNT, 1), f"reduce {what}")
            right = reduced(op, dtype, all_ranks, 5 * n, 2)[5 * here.rank : 5 * here.rank + 5]
            output = torch.empty(5, dtype=dtype, device=here.device)
            dist.reduce_scatter_tensor(output, mine(here, 5 * n, dtype, 2), op=op)
            same(output, right, f"reduce_scatter_tensor {what}")
            output = torch.empty(5, dtype=dtype, device=here.device)
            dist.reduce_scatter(output, list(mine(here, 5 * n, dtype, 2).split(5)), op=op)
            same(output, right, f"reduce_scatter {what}")
            done += 1
    return f"{done} pairs of dtype and operator"


def movements(here: Here) -> str:
    """broadcast, all_gather, all_to_all, gather and scatter of all dtypes; even and uneven."""
    n, rank = here.size, here.rank

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=here.device)

    for number, dtype in enumerate(ALL):
        root = number % n
        data = mine(here, COUNT, dtype)
        dist.broadcast(data, root)
        same(data, values(root, COUNT, dtype), f"broadcast of {dtype}")
        everything = torch.cat([values(r, COUNT, dtype) for r in range(n)])
        output = empty(COUNT * n, dtype)
        dist.all_gather_into_tensor(output, mine(here, COUNT, dtype))
        same(output, everything, f"all_gather_into_tensor of {dtype}")
        pieces = [empty(COUNT, dtype) for _ in range(n)]
        dist.all_gather(pieces, mine(here, COUNT, dtype))
        same(torch.cat([piece.cpu() for piece in pieces]), everything, f"all_gather of {dtype}")
        crossed = torch.cat([values(r, 4 * n, dtype)[4 * rank : 4 * rank + 4] for r in range(n)])
        output = empty(4 * n, dtype)
        dist.all_to_all_single(output, mine(here, 4 * n, dtype))
        same(output, crossed, f"all_to_all_single of {dtype}")
        pieces = [empty(4, dtype) for _ in range(n)]
        dist.all_to_all(pieces, list(mine(here, 4 * n, dtype).split(4)))
        same(torch.cat([piece.cpu() for piece in pieces]), crossed, f"all_to_all of {dtype}")
        gathered = [empty(COUNT, dtype) for _ in range(n)] if rank == root else None
        dist.gather(mine(here, COUNT, dtype), gathered, dst=root)
        if gathered is not None:
            same(torch.cat([piece.cpu() for piece in gathered]), everything, f"gather of {dtype}")
        output = empty(4, dtype)
        dist.scatter(output, list(mine(here, 4 * n, dtype).split(4)) if rank == root else None, src=root)
        same(output, values(root, 4 * n, dtype)[4 * rank : 4 * rank + 4], f"scatter of {dtype}")
    uneven(here)
    dist.barrier()
    return f"{len(ALL)} dtypes"


def uneven(here: Here) -> None:
    n, rank, f = here.size, here.rank, torch.float32
    # Rank r sends r + p + 1 elements to rank p.
    sent, received = [rank + p + 1 for p in range(n)], [r + rank + 1 for r in range(n)]
    output = torch.empty(sum(received), device=here.device)
    dist.all_to_all_single(output, mine(here, sum(sent), f), received, sent)
    parts = []
    for r in range(n):
        counts = [r + p + 1 for p in range(n)]
        parts.append(values(r, sum(counts), f).split(counts)[rank])
    same(output, torch.cat(parts), "all_to_all_single, uneven")
    pieces = [torch.empty(r + 1, device=here.device) for r in range(n)]
    dist.all_gather(pieces, mine(here, rank + 1, f))
    for r, piece in enumerate(pieces):
        same(piece, values(r, r + 1, f), f"all_gather, uneven, of rank {r}")


def shapes(here: Here) -> None:
    """Tensors without elements, not in one piece, overlapping with their own result."""
    n, f = here.size, torch.float32
    dist.all_reduce(torch.empty(0, device=here.device))
    matrix = mine(here, 48, f).view(6, 8)
    right = reduced(Op.SUM, f, range(n), 48).view(6, 8)
    column, transposed = matrix.clone(), matrix.t().contiguous().t()
    dist.all_reduce(column[:, 1])
    same(column[:, 1], right[:, 1], "all_reduce of a column")
    same(column[:, 0], values(here.rank, 48, f).view(6, 8)[:, 0], "the column beside it")
    dist.all_reduce(transposed)
    same(transposed, right, "all_reduce of a transposed matrix")
    data = mine(here, 4 * n, f)
    dist.all_to_all_single(data, data)
    crossed = torch.cat([values(r, 4 * n, f)[4 * here.rank : 4 * here.rank + 4] for r in range(n)])
    same(data, crossed, "all_to_all_single in place")
    data = torch.zeros(5 * n, device=here.device)
    own = data[5 * here.rank : 5 * here.rank + 5]
    own.copy_(mine(here, 5, f))
    dist.all_gather_into_tensor(data, own)
    same(data, torch.cat([values(r, 5, f) for r in range(n)]), "all_gather_into_tensor in place")
    if hasattr(dist, "_make_nccl_premul_sum"):
        data = mine(here, COUNT, f)
        dist.all_reduce(data, op=dist._make_nccl_premul_sum(2.0))
        same(data, 2 * reduced(Op.SUM, f, range(n), COUNT), "all_reduce by PREMUL_SUM")


def refusals(here: Here) -> None:
    """What NCCL lacks is refused under MULTICOMM_CUDA=nccl, and goes through the host otherwise."""
    data = mine(here, COUNT, torch.int16)
    if here.mode == "nccl":
        try:
            dist.all_reduce(data)
        except NotImplementedError as error:
            assert "NCCL has no" in str(error), error
        else:
            raise AssertionError("all_reduce of int16 was not refused")
    else:
        dist.all_reduce(data)
        same(data, reduced(Op.SUM, torch.int16, range(here.size), COUNT), "all_reduce of int16")
    if here.count < 2:
        return
    other = torch.ones(3, device=torch.device(here.kind, (here.device.index + 1) % here.count))
    dist.all_reduce(torch.ones(3, device=here.device))  # the group is bound to its device from here on
    try:
        dist.all_reduce(other)
    except ValueError as error:
        assert "the first tensors of this group were on" in str(error), error
    else:
        raise AssertionError("tensors of two devices in one group were not refused")


def asynchronous(here: Here) -> None:
    """Many operations of several kinds in flight; waited for in the opposite order."""
    n, f = here.size, torch.float32
    pending = []
    for number in range(30):
        data = mine(here, 100 + number, f, number)
        pending.append((dist.all_reduce(data, async_op=True), data, reduced(Op.SUM, f, range(n), 100 + number, number)))
        output = torch.empty(n * 9, device=here.device)
        work = dist.all_gather_into_tensor(output, mine(here, 9, f, number), async_op=True)
        pending.append((work, output, torch.cat([values(r, 9, f, number) for r in range(n)])))
    for number, (work, data, right) in enumerate(reversed(pending)):
        work.wait()
        same(data, right, f"operation {number} from the end")
        assert work.is_success() or not work.is_completed()


def coalesced(here: Here) -> None:
    f = torch.float32
    tensors = [mine(here, 50 + i, f, i) for i in range(12)]
    with dist._coalescing_manager(device=here.device, async_ops=True) as block:
        for tensor in tensors:
            dist.all_reduce(tensor)
    block.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, reduced(Op.SUM, f, range(here.size), 50 + i, i), f"coalesced all_reduce {i}")
    inputs = [mine(here, 8, f, i) for i in range(5)]
    outputs = [torch.empty(8 * here.size, device=here.device) for _ in inputs]
    with dist._coalescing_manager(device=here.device):
        for output, given in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, given)
    for i, output in enumerate(outputs):
        right = torch.cat([values(r, 8, f, i) for r in range(here.size)])
        same(output, right, f"coalesced all_gather_into_tensor {i}")


def fused(here: Here) -> str:
    """Small tensors travel together: those given at once in far fewer launches; those one by one, as it comes."""
    f, count = torch.float32, here.scaled(1000, 200)
    tensors = [mine(here, 17 + i % 50, f, i) for i in range(count)]
    broadcasts = [mine(here, 11, torch.int32, i) for i in range(50)]
    at_once = [mine(here, 17 + i % 50, f, i) for i in range(100)]
    start = here.stats()
    with dist._coalescing_manager(device=here.device, async_ops=True) as block:
        for tensor in at_once:
            dist.all_reduce(tensor)
    block.wait()
    before = here.stats()
    given, launches = (before[key] - start[key] for key in ("batched_operations", "batches"))
    assert given == 100, f"{given} operations counted, not 100"
    assert launches <= 50, f"100 operations given at once took {launches} launches"
    for i, tensor in enumerate(at_once):
        same(tensor, reduced(Op.SUM, f, range(here.size), 17 + i % 50, i), f"all_reduce {i} of those given at once")
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works += [dist.broadcast(tensor, here.size - 1, async_op=True) for tensor in broadcasts]
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, reduced(Op.SUM, f, range(here.size), 17 + i % 50, i), f"fused all_reduce {i}")
    for i, tensor in enumerate(broadcasts):
        same(tensor, values(here.size - 1, 11, torch.int32, i), f"fused broadcast {i}")
    after = here.stats()
    operations, batches = (after[key] - before[key] for key in ("batched_operations", "batches"))
    assert operations == len(works), f"{operations} operations counted, not {len(works)}"
    return f"100 given at once in {launches} launches, {operations} one by one in {batches}"


def messages(here: Here) -> None:
    """send and recv, isend and irecv with tags, rings by batch_isend_irecv; all dtypes."""
    n, rank, f = here.size, here.rank, torch.float32
    if n < 2:
        raise SkipCheck("one rank")
    after, before = (rank + 1) % n, (rank - 1) % n
    for dtype in ALL:
        output = torch.empty(COUNT, dtype=dtype, device=here.device)
        ops = [
            dist.P2POp(dist.isend, mine(here, COUNT, dtype), after),
            dist.P2POp(dist.irecv, output, before),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(output, values(before, COUNT, dtype), f"a ring of {dtype}")
    if rank == 0:
        for peer in range(1, n):
            dist.send(mine(here, 100, f, peer), peer)
    else:
        output = torch.empty(100, device=here.device)
        dist.recv(output, 0)
        same(output, values(0, 100, f, rank), "recv")
    pair = rank ^ 1
    if pair < n:
        outputs = [torch.empty(200 + i, device=here.device) for i in range(8)]
        works = [dist.irecv(output, pair) for output in outputs]
        works += [dist.isend(mine(here, 200 + i, f, i), pair) for i in range(8)]
        for work in works:
            work.wait()
        for i, output in enumerate(outputs):
            same(output, values(pair, 200 + i, f, i), f"irecv {i}")
    # Everybody to everybody, several rounds in flight.
    works, expected = [], []
    for turn in range(4):
        for peer in range(n):
            if peer == rank:
                continue
            output = torch.empty(1000, device=here.device)
            works.append(dist.irecv(output, peer))
            works.append(dist.isend(mine(here, 1000, f, turn), peer))
            expected.append((output, values(peer, 1000, f, turn)))
    for work in works:
        work.wait()
    for output, right in expected:
        same(output, right, "messages between all")


def large(here: Here) -> str:
    """Several chunks, and sizes that no chunk divides; up to 64 MiB."""
    n = here.size
    sizes = [(1 << 20) + 3, (4 << 20) // 4, (4 << 20) // 4 + 1, (64 << 20) // 4]
    if here.double:
        sizes = [(1 << 16) + 3, 1 << 18]
    for count in sizes:
        pattern = torch.arange(count, device=here.device).remainder_(1009).float()
        data = pattern * (here.rank + 1)
        dist.all_reduce(data)
        assert torch.equal(data, pattern * (n * (n + 1) // 2)), f"all_reduce of {count} elements"
        data = pattern * (here.rank + 1)
        dist.broadcast(data, n - 1)
        assert torch.equal(data, pattern * n), f"broadcast of {count} elements"
        each = count // n
        output = torch.empty(each * n, device=here.device)
        dist.all_gather_into_tensor(output, pattern[:each] * (here.rank + 1))
        for r in range(n):
            assert torch.equal(output[each * r : each * r + each], pattern[:each] * (r + 1)), f"all_gather of {count}"
        output = torch.empty(each, device=here.device)
        dist.reduce_scatter_tensor(output, pattern[: each * n] * (here.rank + 1))
        right = pattern[each * here.rank : each * here.rank + each] * (n * (n + 1) // 2)
        assert torch.equal(output, right), f"reduce_scatter of {count} elements"
        output = torch.empty(each * n, device=here.device)
        dist.all_to_all_single(output, pattern[: each * n] * (here.rank + 1))
        for r in range(n):
            right = pattern[each * here.rank : each * here.rank + each] * (r + 1)
            assert torch.equal(output[each * r : each * r + each], right), f"all_to_all of {count} elements"
        if n > 1:
            output = torch.empty(count, device=here.device)
            receiving = dist.irecv(output, (here.rank - 1) % n)
            sending = dist.isend(pattern + here.rank, (here.rank + 1) % n)
            receiving.wait()
            sending.wait()
            assert torch.equal(output, pattern + (here.rank - 1) % n), f"a ring of {count} elements"
    return f"up to {max(sizes) * 4 / 2**20:g} MiB"


def both_kinds(here: Here) -> None:
    """Tensors of the CPU and of the device in one group, in turn and at once; objects."""
    works, pending = [], []
    for number in range(20):
        on_cpu, on_device = torch.full((50,), float(here.rank)), here.full(50, here.rank + number)
        works += [dist.all_reduce(on_cpu, async_op=True), dist.all_reduce(on_device, async_op=True)]
        pending.append((number, on_cpu, on_device))
    for work in works:
        work.wait()
    total = here.size * (here.size - 1) / 2
    for number, on_cpu, on_device in pending:
        same(on_cpu, torch.full((50,), total, dtype=torch.float64), "on the CPU")
        same(on_device, torch.full((50,), total + number * here.size, dtype=torch.float64), "on the device")
    objects: list[object] = [None] * here.size
    dist.all_gather_object(objects, {"rank": here.rank})
    assert objects == [{"rank": r} for r in range(here.size)], objects


def says_that_it_is_slow(here: Here) -> None:
    """Ranks that share a device under MULTICOMM_CUDA=auto: it works, and one rank says once why it is slow.

    Looks at this rank's own stderr, so the warning must not have come before.
    """
    file = here.out / f"stderr{here.rank}"
    kept = os.dup(2)
    with file.open("w") as target:
        os.dup2(target.fileno(), 2)
        try:
            for _ in range(2):
                data = here.full(10, 1)
                dist.all_reduce(data)
                same(data, torch.full((10,), float(here.size), dtype=torch.float64), "all_reduce")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    said = Path(file).read_text()
    sys.stderr.write(said)
    wanted = 1 if here.rank == 0 else 0
    assert said.count("moved through host memory") == wanted, f"rank {here.rank} said: {said!r}"
    assert wanted == 0 or "share one device" in said, said
