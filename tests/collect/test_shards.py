"""What each of four processes holds of a tensor: the pieces of all put together, without any of them asking another.

The processes are four goes of this one in a group of torch's own whose collectives do nothing: the placements are real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.testing._internal.distributed.fake_pg import FakeStore

from statsbridge.collect.scalars import all_scalars, as_scalar
from statsbridge.collect.shards import WHOLE, Layout, Part, Share

FULL = torch.arange(1.0, 16.0).reshape(5, 3)
WORLD = 4


@contextmanager
def process(rank: int) -> Iterator[Any]:
    """Be one of four processes; the mesh of two by two."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield init_device_mesh("cpu", (2, 2))
    finally:
        torch.distributed.destroy_process_group()


def on_each(look: Callable[[Any], Any]) -> list[Any]:
    found = []
    for rank in range(WORLD):
        with process(rank) as mesh:
            found.append(look(mesh))
    return found


@pytest.mark.parametrize(
    ("placements", "shards"),
    [
        ([Replicate(), Shard(0)], 2),  # HSDP
        ([Shard(0), Replicate()], 2),
        ([Shard(0), Shard(1)], 4),  # FSDP and tensor parallel
        ([Shard(0), Shard(0)], 4),  # of five rows: 2, 1, 1, 1
        ([Shard(1), Shard(1)], 4),  # of three columns: one process has none
        ([Replicate(), Replicate()], 1),
    ],
)
def test_the_pieces_of_all_ranks_are_the_whole(placements: list[Placement], shards: int) -> None:
    def look(mesh: Any) -> tuple[Any, Any, Any]:
        layout = Layout()
        tensor = distribute_tensor(FULL, mesh, placements, src_data_rank=None)
        return layout.held(tensor, tensor), layout.norm([tensor], [tensor], {}), layout.counted_here(tensor)

    found = on_each(look)
    assert {held.share.shards for held, _, _ in found} == {shards}
    assert {held.share.shard for held, _, _ in found} == set(range(shards))
    by_shard = {held.share.shard: held.tensor for held, _, _ in found}
    for held, _, _ in found:
        assert type(held.tensor) is torch.Tensor
        assert torch.equal(held.tensor, by_shard[held.share.shard]), "the same piece has the same elements"
    for pieces in (list(by_shard.values()), [held.tensor for held, _, _ in found if held.counted]):
        assert sorted(torch.cat([piece.flatten() for piece in pieces]).tolist()) == FULL.flatten().tolist()
    norms = [norm for _, norm, _ in found]
    if shards == 1:
        assert norms == [Part(pytest.approx(float(FULL.norm())), WHOLE)] * WORLD
    else:
        assert [norm.share for norm in norms] == [Share(rank, WORLD) for rank in range(WORLD)]
        assert math.hypot(*(norm.value for norm in norms)) == pytest.approx(float(FULL.norm()))
    for held, _, here in found:
        assert (here == "replicated") if not held.counted else torch.equal(here, held.tensor)


def test_sums_that_were_not_made_are_no_numbers() -> None:
    def look(mesh: Any) -> tuple[Any, Any]:
        layout = Layout()
        tensor = DTensor.from_local(FULL, mesh, [Replicate(), Partial()])
        return layout.norm([tensor], [tensor], {}), layout.counted_here(tensor)

    assert on_each(look) == [(None, "partial")] * WORLD


def test_norms_of_cut_and_of_whole_tensors_combine() -> None:
    """Ordinary tensors beside DTensors, and two optimizers of which one has only whole ones."""
    whole = torch.tensor([3.0, 4.0])

    def look(mesh: Any) -> tuple[Any, Any]:
        layout = Layout()
        cut = distribute_tensor(FULL, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        one = layout.norm([cut, whole], [cut, whole], {})
        apart = layout.norm([cut], [cut], {}), layout.norm([whole], [whole], {})
        assert apart[1] == Part(5.0, WHOLE)
        return one, layout.combine(apart)

    for norms in zip(*on_each(look), strict=True):
        assert math.hypot(*(norm.value for norm in norms)) == pytest.approx(math.hypot(float(FULL.norm()), 5.0))


def test_one_process_has_plain_numbers() -> None:
    layout = Layout()
    assert layout.held(FULL, FULL).share is None
    assert layout.norm([FULL], [FULL], {}) == pytest.approx(float(FULL.norm()))
    assert layout.combine([3.0, 4.0]) == 5.0
    assert layout.gradient_norm([torch.nn.Parameter(FULL.clone())], {}) is None


def test_a_scalar_that_is_a_dtensor() -> None:
    """clip_grad_norm_ returns one: known here as a whole, as a part of an L2 norm, or not at all."""

    def look(mesh: Any) -> list[Any]:
        kinds: list[list[Placement]] = [
            [Replicate(), Replicate()],
            [Replicate(), _NormPartial(2)],
            [Partial(), Replicate()],
            [Replicate(), _NormPartial(1)],
        ]
        return [as_scalar(DTensor.from_local(torch.tensor(3.0), mesh, kind)) for kind in kinds]

    for rank, (known, part, *unknown) in enumerate(on_each(look)):
        assert known == Part(3.0, WHOLE)
        assert part == Part(3.0, Share(rank % 2, 2))
        assert unknown == [None, None]


def test_a_gradient_norm_given_by_hand_is_that_of_the_whole() -> None:
    applied = Part(2.0, Share(1, 2))
    values = all_scalars({"grad_norm_applied": applied}, 0.5, {"grad_norm": 7.0, "samples": 8.0})
    assert values["grad_norm"] == Part(7.0, WHOLE)
    assert values["samples_per_second"] == 16.0
    assert all_scalars({"grad_norm_applied": applied}, 0.5, {})["grad_norm"] == applied
    assert all_scalars({"grad_norm_applied": 2.0}, 0.5, {"grad_norm": 7.0})["grad_norm"] == 7.0
