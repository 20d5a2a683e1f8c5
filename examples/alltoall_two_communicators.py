"""Two MPI communicators as torch process groups: an alltoall on the world, one on the ranks of the same parity.

    mpirun -n 4 python examples/alltoall_two_communicators.py
    torchrun --standalone --nproc-per-node 4 examples/alltoall_two_communicators.py

Rank r sends the number 10 * r + d to the d-th rank of the communicator. Both operations are under way at the same time;
odd ranks start them in the other order, which is no problem.
"""

from __future__ import annotations

import sys

import multicomm
import torch
import torch.distributed as dist


def main() -> int:
    world = multicomm.world()  # mpi4py's MPI.COMM_WORLD; under torchrun, multicomm makes MPI's world
    parity = world.Split(color=world.rank % 2, key=world.rank)
    communicators = [world, parity]
    multicomm.init(comms=communicators)

    order = [0, 1] if world.rank % 2 == 0 else [1, 0]
    received, works = {}, []
    for index in order:
        size = communicators[index].size
        sent = torch.tensor([10 * world.rank + place for place in range(size)])
        received[index] = torch.empty_like(sent)
        works.append(dist.all_to_all_single(received[index], sent, group=multicomm.group(index), async_op=True))
    for work in works:
        work.wait()

    wrong = 0
    for index, name in enumerate(("world", "parity")):
        group = multicomm.group(index)
        members = dist.get_process_group_ranks(group)
        expected = [10 * member + dist.get_rank(group) for member in members]
        right = received[index].tolist() == expected
        wrong += not right
        print(
            f"rank {world.rank}, {name} {members}: received {received[index].tolist()}"
            + ("" if right else f", WRONG: {expected} was expected"),
            flush=True,
        )
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
