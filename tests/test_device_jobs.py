"""Device tensors in whole jobs: launch order, failures, streams, futures, training.

The device is simulated (tests/device) and NCCL is a double, so this shows what multicomm asks of them, in which order,
and what it makes of their answers. It cannot show NCCL's own protocols, a GPU's kernels, memory or speed, nor that the
real ones behave as the doubles do; `make test-gpu` is for that.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import needs_multicomm, raises
from harness.jobs import launch, say
from harness.simulated import DEVICE_MPI, SPEC, group, join, kernels, on_devices, plan_failure

pytestmark = needs_multicomm("has no simulated devices")
SOON = 6.0  # seconds
LARGE = 70_000  # elements: neither fused nor small


def check_sum(device: torch.device, pg: dist.ProcessGroup | None = None, size: int = 5) -> None:
    ranks = dist.get_process_group_ranks(pg or dist.group.WORLD)
    tensor = torch.full((size,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(tensor, group=pg)
    assert (tensor.cpu() == sum(rank + 1 for rank in ranks)).all(), tensor


# --- the order of launches ---

OVERLAPPING = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [0, 2], [1, 3], [0, 1, 2, 3]]


def opposite_orders() -> None:
    rank, device = join(8)
    groups = [(members, group(members, 8)) for members in OVERLAPPING]
    mine = [(members, pg) for members, pg in groups if rank in members]
    seed = int(os.environ["SEED"])
    shuffle = random.Random(seed * 100 + rank).shuffle
    for step in range(20):
        shuffle(mine)
        tensors = [torch.full((LARGE,), float(rank + 1), device=device) for _ in mine]
        works = [
            dist.all_reduce(tensor, group=pg, async_op=True) for tensor, (_, pg) in zip(tensors, mine, strict=True)
        ]
        if step % 2:
            works.reverse()
        for work in works:
            work.wait()
        for tensor, (members, _) in zip(tensors, mine, strict=True):
            assert (tensor.cpu() == sum(r + 1 for r in members)).all(), (step, members)
    say(f"rank {rank} is done")


@pytest.mark.parametrize("seed", range(1, 4))
def test_opposite_orders_complete(seed: int, tmp_path: Path) -> None:
    """Ten overlapping groups, each rank in an order of its own, on devices that run strictly in launch order."""
    environment = on_devices(SEED=str(seed), SIM_DELAY_US="100", SIM_SEED=str(seed))
    launch(opposite_orders, 4, tmp_path, environment=environment).check().says("is done", 4)


def test_without_the_order_they_hang(tmp_path: Path) -> None:
    """So that the test above can fail: the time-out frees the devices, and says what they hung in."""
    told = "this rank's device has it in its queue, but is not done with it"
    for seed in range(1, 6):  # now and then one gets through, or hangs before a device has its part
        folder = tmp_path / str(seed)
        folder.mkdir()
        environment = on_devices(SEED=str(seed), MULTICOMM_ORDER="relaxed")
        job = launch(opposite_orders, 4, folder, environment=environment)
        if told in job.output:
            break
    job.check(ok=False)
    job.says(told)
    job.says("What the device made of")


def messages_and_collectives() -> None:
    """Messages of a ring against collectives of overlapping groups, the ranks in different orders."""
    rank, device = join(20)
    world = dist.get_world_size()
    pairs = [(pair, group(pair)) for pair in ([0, 1], [1, 2], [2, 3], [0, 3])]
    mine = [pg for pair, pg in pairs if rank in pair]
    draw = random.Random(rank)
    for step in range(15):
        sent = torch.full((LARGE,), float(rank), device=device)
        received = torch.empty(LARGE, device=device)
        sums = [torch.ones(LARGE, device=device) for _ in mine]
        calls: list[Callable[[], dist.Work]] = [
            lambda sent=sent: dist.isend(sent, (rank + 1) % world),
            lambda received=received: dist.irecv(received, (rank - 1) % world),
            *[lambda t=t, pg=pg: dist.all_reduce(t, group=pg, async_op=True) for t, pg in zip(sums, mine, strict=True)],
        ]
        draw.shuffle(calls)
        for work in [call() for call in calls]:
            work.wait()
        assert (received.cpu() == (rank - 1) % world).all(), step
        assert all((t.cpu() == 2).all() for t in sums), step


def test_messages_are_in_the_order(tmp_path: Path) -> None:
    launch(messages_and_collectives, 4, tmp_path, environment=on_devices(SIM_DELAY_US="50")).check()


# --- failures ---


def wait_for_the_dead() -> None:
    rank, device = join()
    pair = group([0, 1])
    check_sum(device)
    check_sum(device, pair)
    if rank == 2:
        time.sleep(0.5)  # the others are in their calls by then; if not, they meet the same a moment later
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    raises(lambda: dist.all_reduce(torch.ones(5, device=device)), "it is dead", dist.DistBackendError, r"\brank 2\b")
    assert time.monotonic() - begin < SOON
    check_sum(device, pair, LARGE)
    say(f"rank {rank} was told")
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["nccl", "staged"])
def test_a_killed_rank(mode: str, tmp_path: Path) -> None:
    job = launch(
        wait_for_the_dead, 3, tmp_path, "--monitor-interval", "10", environment=on_devices(MULTICOMM_CUDA=mode)
    )
    job.check(ok=False).says("was told", 2)


def die_in_a_kernel() -> None:
    """Rank 1 dies with its part of a collective not on its device: rank 0's hangs in it until it is aborted."""
    rank, device = join()
    check_sum(device)
    if rank == 1:
        plan_failure("hang:1")
    tensor = torch.ones(LARGE, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    tensor.cpu()  # waits for the device
    assert time.monotonic() - begin < SOON
    raises(lambda: dist.all_reduce(torch.ones(5, device=device)), "later", dist.DistBackendError, r"\brank 1\b")
    assert work.exception() is not None
    check_sum(device, dist.new_group([0], backend=SPEC))
    say("the device is free")


def test_a_rank_dies_in_a_kernel(tmp_path: Path) -> None:
    job = launch(die_in_a_kernel, 2, tmp_path, "--monitor-interval", "10", environment=on_devices()).check(ok=False)
    job.says("the device is free", 1)
    job.says("What the device made of it is undefined")


def hangs_on_the_device() -> None:
    rank, device = join(2)
    pair = group([0, 1])
    check_sum(device)
    if rank == 0:
        plan_failure(os.environ["FAULT"])
    tensor = torch.ones(LARGE, device=device)
    begin = time.monotonic()

    def both() -> None:
        dist.all_reduce(tensor)
        torch.get_device_module("sim").synchronize()
        dist.all_reduce(tensor)

    raises(both, "it hangs", dist.DistBackendError, "time-out of|gave this group up|remote")
    assert time.monotonic() - begin < 2 + SOON
    torch.get_device_module("sim").synchronize()
    if rank == 0:
        plan_failure("")
    check_sum(device, pair)
    say(f"rank {rank} goes on")


@pytest.mark.parametrize("fault", ["hang:1", "async:1", "launch:1"])
def test_a_device_that_fails(fault: str, tmp_path: Path) -> None:
    """NCCL's kernel hangs, or fails later, or its launch fails, on one rank: its group ends on all, others go on."""
    launch(hangs_on_the_device, 2, tmp_path, environment=on_devices(FAULT=fault)).check().says("goes on", 2)


def cannot_start() -> None:
    rank, device = join(3)
    if rank == 0:
        plan_failure(os.environ["FAULT"])
    pattern = "system error|gave this group up|NCCL|time-out"
    raises(lambda: dist.all_reduce(torch.ones(5, device=device)), "no communicator", dist.DistBackendError, pattern)
    plan_failure("")
    check_sum(device, group([0, 1]))
    say(f"rank {rank} goes on")


@pytest.mark.parametrize("fault", ["init:1", "hanginit:1"])
def test_a_communicator_that_cannot_be_made(fault: str, tmp_path: Path) -> None:
    launch(cannot_start, 2, tmp_path, environment=on_devices(FAULT=fault)).check().says("goes on", 2)


def aborts() -> None:
    rank, device = join()
    pair = group([0, 1])
    check_sum(device)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.all_reduce(torch.ones(5, device=device), async_op=True)
        dist.group.WORLD._get_backend(device).abort()
        raises(work.wait, "aborted", dist.DistBackendError, "aborted on this rank")
        store.set("aborted", "1")
    else:
        store.wait(["aborted"])
        begin = time.monotonic()
        raises(
            lambda: [dist.all_reduce(torch.ones(5, device=device)) for _ in range(2)],
            "a peer aborted",
            dist.DistBackendError,
            "rank 0 gave this group up",
        )
        assert time.monotonic() - begin < SOON
    check_sum(device, pair)


def test_abort(tmp_path: Path) -> None:
    launch(aborts, 2, tmp_path, environment=on_devices()).check()


def leaves_without_a_word() -> None:
    rank, device = join()
    for _ in range(3):
        dist.all_reduce(torch.ones(LARGE, device=device), async_op=True)
    say(f"rank {rank} ends")


@pytest.mark.parametrize("mode", ["nccl", "staged"])
def test_the_end_without_destroy(mode: str, tmp_path: Path) -> None:
    job = launch(leaves_without_a_word, 2, tmp_path, environment=on_devices(MULTICOMM_CUDA=mode)).check()
    job.ends_within(20)


def blocking_wait() -> None:
    rank, device = join(2)
    check_sum(device)
    if rank == 0:
        plan_failure("hang:1")
    raises(lambda: dist.all_reduce(torch.ones(5, device=device)), "it hangs", dist.DistBackendError, "time-out|gave")


def test_blocking_wait_tells_of_the_device(tmp_path: Path) -> None:
    launch(blocking_wait, 2, tmp_path, environment=on_devices(MULTICOMM_CUDA_BLOCKING_WAIT="1")).check()


# --- which plane ---


def chooses() -> None:
    rank, device = join(shared=os.environ["SHARED"] == "1")
    try:
        check_sum(device)
    except dist.DistBackendError as error:
        say(f"rank {rank}: refused: {error}")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)  # the group goes on
        assert (tensor == dist.get_world_size()).all()
        return
    say(f"rank {rank}: {'NCCL' if kernels() else 'staged'}")


@pytest.mark.parametrize(
    ("mode", "shared", "library", "words"),
    [
        ("auto", False, True, "NCCL"),
        ("auto", True, True, "staged"),
        ("staged", False, True, "staged"),
        ("nccl", True, True, "refused: .*ranks 0 and 1 share one device"),
        ("nccl", False, False, "refused: .*NCCL was not found"),
    ],
)
def test_choice_of_plane(mode: str, shared: bool, library: bool, words: str, tmp_path: Path) -> None:
    environment = on_devices(MULTICOMM_CUDA=mode, SHARED=str(int(shared)))
    if not library:
        environment["MULTICOMM_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
    job = launch(chooses, 2, tmp_path, environment=environment).check()
    for rank in range(2):
        pattern = f"rank {rank}: {words}".replace(".*", "[^\n]*")
        assert re.search(pattern, job.output), job.output[-4000:]


def moves_on_the_device() -> None:
    rank, device = join(shared=True)
    for size in (5, LARGE):
        tensor = torch.full((size,), float(rank), device=device)
        dist.broadcast(tensor, 1)
        assert (tensor.cpu() == 1).all()
        pieces = torch.empty(2, size, device=device)
        dist.all_gather_into_tensor(pieces, torch.full((size,), float(rank), device=device))
        assert (pieces.cpu() == torch.tensor([[0.0], [1.0]])).all()
        apart = [torch.empty(size, device=device) for _ in range(2 + rank)][rank:]  # one piece on some ranks only
        dist.all_gather(apart if rank else list(torch.empty(2, size, device=device)), pieces[rank])
        check_sum(device, size=size)
    assert ctypes.CDLL(None).device_mpi_largest() == LARGE
    say(f"rank {rank} is done")


def test_mpi_that_takes_device_memory(tmp_path: Path) -> None:
    """Whether or not it says so: the simulated device's memory is the host's."""
    environment = on_devices(LD_PRELOAD=str(DEVICE_MPI), MULTICOMM_STAGING_BYTES="1000")
    launch(moves_on_the_device, 2, tmp_path, environment=environment).check().says("is done", 2)


def names_the_missing_library() -> None:
    _, device = join()
    check_sum(device)


def test_no_nccl_says_where_it_was_looked_for(tmp_path: Path) -> None:
    environment = {"MULTICOMM_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}
    job = launch(names_the_missing_library, 2, tmp_path, environment=environment).check()
    job.says("moved through host memory, which is slow: rank 0 has no NCCL", 1)


# --- streams and futures ---


# What is staged is launched when its result is on the way back: behind the gate, wait() then blocks.
GATED = os.environ.get("MULTICOMM_CUDA") == "nccl"


def follows_streams() -> None:
    """With a gate on the submitting stream: the communication waits for it, the host does not."""
    from device import simulated

    rank, device = join()
    side = torch.Stream(device=device)
    tensor = torch.zeros(LARGE, device=device)
    torch.get_device_module("sim").synchronize()  # it was filled on another stream
    with side:
        gate = simulated.block()
        tensor.fill_(rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
    if not GATED:
        gate.open()
    work.wait()  # in another stream than the one that it was submitted from
    doubled = tensor * 2  # on the current stream, behind the operation
    if GATED:
        assert not work.is_completed()
        gate.open()
    world = dist.get_world_size()
    assert (doubled.cpu() == world * (world + 1)).all()
    while not work.is_completed():
        time.sleep(0.001)
    # Dropped at once: the memory must last until the device is done.
    works = []
    for _ in range(20):
        works.append(dist.all_reduce(torch.ones(LARGE, device=device), async_op=True))
        torch.full((LARGE,), 7.0, device=device)
    kept = torch.ones(LARGE, device=device)
    dist.all_reduce(kept)
    dist.all_reduce(kept, async_op=True)  # twice means twice
    dist.all_reduce(kept, async_op=True).wait()
    assert (kept.cpu() == world**3).all()
    for work in works:
        work.wait()


def futures() -> None:
    from device import simulated

    rank, device = join()
    world = dist.get_world_size()
    gate = simulated.block()
    tensor = torch.full((LARGE,), rank + 1.0, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    chained = work.get_future().then(lambda f: f.value()[0] * 2)
    if not GATED:
        gate.open()
    with torch.Stream(device=device):  # the callback ran before the device was done, on a stream that waits for it
        doubled = chained.wait()
        if GATED:
            assert not work.is_completed()
            gate.open()
        assert (doubled.cpu() == world * (world + 1)).all()
    result = work.get_future_result() if hasattr(work, "get_future_result") else None
    if result is not None:
        result.wait()
    dist.all_reduce(torch.ones(3, device=device), async_op=True).get_future().wait()


@pytest.mark.parametrize("body", [follows_streams, futures], ids=lambda body: body.__name__)
@pytest.mark.parametrize("mode", ["nccl", "staged"])
def test_streams(body: Callable[[], None], mode: str, tmp_path: Path) -> None:
    environment = on_devices(MULTICOMM_CUDA=mode, SIM_DELAY_US="200")
    launch(body, 2, tmp_path, environment=environment).check()


# --- training ---


def trains() -> None:
    """Data parallel training in two overlapping groups, against the same on one process."""
    from torch.nn.parallel import DistributedDataParallel

    rank, device = join(shared=os.environ["SHARED"] == "1")
    world = dist.get_world_size()
    torch.manual_seed(1)

    def network() -> torch.nn.Module:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300), torch.nn.Linear(300, 4)]
        return torch.nn.Sequential(*layers)

    data = torch.randn(world, 8, 20)
    alone = network()
    model = network().to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(data.flatten(0, 1)).square().mean().backward()
        wrapped(data[rank].to(device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-6)


def trains_sharded() -> None:
    """FSDP over half of the ranks, replicated over the halves, against the same on one process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, device = join()
    columns = [group([0, 2]), group([1, 3])]
    rows = [group([0, 1]), group([2, 3])]
    layout = [[0, 1], [2, 3]]
    mesh = DeviceMesh.from_group([columns[rank % 2], rows[rank // 2]], "sim", layout, mesh_dim_names=("a", "b"))

    def network() -> torch.nn.Sequential:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    torch.manual_seed(1)
    data = torch.randn(4, 8, 20)
    alone, model = network(), network().to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for _ in range(3):
        alone(data.flatten(0, 1)).square().mean().backward()
        model(data[rank].to(device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor().detach().cpu(), right.detach(), rtol=1e-4, atol=1e-6)


def test_sharded_training(tmp_path: Path) -> None:
    launch(trains_sharded, 4, tmp_path, environment=on_devices()).check()


@pytest.mark.parametrize("shared", [False, True], ids=["nccl", "staged"])
def test_data_parallel_training(shared: bool, tmp_path: Path) -> None:
    environment = on_devices(SHARED=str(int(shared)), SIM_DELAY_US="50")
    launch(trains, 3, tmp_path, environment=environment).check()
