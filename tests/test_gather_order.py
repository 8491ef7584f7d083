"""What the waits of a gather order, on devices that check it."""

from __future__ import annotations

import pytest
import torch

from ci.register import register_cpu_ci
from harness.lockstep import Lockstep
from harness.sim import SimGroup, Simulation
from kvshard_ref.components import Component
from kvshard_ref.errors import LayerOrderError
from kvshard_ref.gather import PrefixGather
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.scratch import ScratchSize

register_cpu_ci(est_time=10, stage="commit")


def test_a_batch_that_ends_early_leaves_no_gather_behind() -> None:
    """After a batch that never read its first layer, the pages of its prefix may be written at once."""
    placement = Placement(2, 2)
    simulation = Simulation(2, order=True)

    def program(rank: int) -> None:
        device = simulation.devices[rank]
        pool = ShardPool(rank, placement, 3, 2, (Component("kv", 1, torch.int64),), device.device)
        group = SimGroup(device, lockstep.groups[rank])
        gather = PrefixGather(pool, group, ScratchSize(8, 4, 2), "tight", device)
        gather.begin([[2, 3]], [[4]])
        with pytest.raises(LayerOrderError, match="layer 0 of 2 never read"):
            gather.end()
        pool.pages(0, "kv")[1].fill_(7)  # of the page that the gather reads

    with Lockstep(2) as lockstep:
        simulation.run(lockstep, program)
