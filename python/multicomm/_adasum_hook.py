"""Adasum as a hook of DistributedDataParallel, which looks at the annotations: they are no strings here."""

from typing import Any

import torch
import torch.distributed as dist

from multicomm._adasum import adasum_of_bucket


def adasum_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: each parameter's gradient becomes the group's adaptive sum.

    ``model.register_comm_hook(group, multicomm.adasum_hook)``; the group is the model's, or None for the world.
    """
    return adasum_of_bucket(group, bucket.buffer(), bucket.gradients(), bucket.parameters()[0])


__all__ = ["adasum_hook"]
