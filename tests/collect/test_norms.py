"""Global norms against float64 numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from statsbridge.collect import statistics
from statsbridge.collect.norms import combine_norms, global_norm
from statsbridge.collect.statistics import Wanted, measure, sum_of_squares


def oracle(tensors: list[torch.Tensor]) -> float:
    return float(np.linalg.norm(np.concatenate([t.to_dense().double().numpy().ravel() for t in tensors])))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-22, 1e12, 1e25])
@pytest.mark.parametrize("sizes", [[3], [100_000], [10, 64, 70_000, 5], [300_000, 1]])
def test_norm_of_all_elements(scale: float, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(size, generator=generator) * scale for size in sizes]
    assert global_norm(tensors) == pytest.approx(oracle(tensors), rel=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    tensors = [torch.randn(1000).mul(300).to(dtype), torch.randn(70_000).to(dtype)]
    assert global_norm(tensors) == pytest.approx(oracle(tensors), rel=1e-6)


def test_layouts() -> None:
    torch.manual_seed(0)
    image = torch.randn(4, 8, 32, 32)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.tensor([1.0, 2.0, 3.0]), (5,))
    for tensor in (
        image.to(memory_format=torch.channels_last),
        torch.randn(300, 301).t(),
        torch.randn(600, 300)[::2],
        sparse,  # index 0 is there twice: its values add up
    ):
        assert global_norm([tensor]) == pytest.approx(oracle([tensor]), rel=2e-6)


class Dispatched(TorchDispatchMode):
    """The names of the operations of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def sparse(indices: torch.Tensor | list[list[int]], values: torch.Tensor, *shape: int) -> torch.Tensor:
    indices = torch.as_tensor(indices, dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


UNCOALESCED = {
    "embedding": sparse(torch.randint(0, 50, (1, 300)), torch.randn(300, 16), 1000, 16),
    "every dimension": sparse(torch.randint(0, 4, (3, 100)) * torch.tensor([[1], [2], [0]]), torch.randn(100), 4, 7, 1),
    "bfloat16": sparse(torch.randint(0, 9, (1, 40)), torch.rand(40, 3).bfloat16(), 10, 3),
    "cancels out": sparse([[2, 2, 5]], torch.tensor([1e3, -1e3, 1e-3]), 9),
    "complex": sparse([[2, 2, 5]], torch.tensor([1 + 2j, 3j, 1]), 9),
    "one": sparse([[2]], torch.tensor([[3.0, 4.0]]), 9, 2),
    "nothing": sparse([[]], torch.empty(0, 4), 9, 4),
}
COUNTING = {"_coalesce", "coalesce", "_unique2", "nonzero", "_local_scalar_dense", "masked_select"}


@pytest.mark.parametrize("case", UNCOALESCED)
def test_the_device_is_not_asked_how_many_indices_a_sparse_gradient_has(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = UNCOALESCED[case]
    exact = sparse(tensor._indices(), tensor._values().to(torch.complex128), *tensor.shape).to_dense()
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)
    with Dispatched() as operations:
        norm = global_norm([tensor, torch.zeros(3)])
    rounded = 2**-8 if case == "bfloat16" else 1e-6
    assert float(norm) == pytest.approx(torch.linalg.vector_norm(exact).item(), rel=rounded)
    assert not operations.seen & COUNTING


def test_sums_in_a_sparse_gradient_overflow_as_they_do_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([6e4, 6e4, 1.0], dtype=torch.float16)
    tensor = sparse([[4, 4, 1]], values, 9)
    assert global_norm([tensor]) == math.inf
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)
    assert float(global_norm([tensor])) == math.inf
    values[0] = math.nan
    assert math.isnan(float(global_norm([sparse([[4, 4, 1]], values, 9)])))


def test_not_a_number_and_infinity_are_told() -> None:
    fine = torch.randn(100_000)
    assert math.isnan(global_norm([fine, torch.tensor([1.0, math.nan])]))  # type: ignore[arg-type]
    assert math.isnan(global_norm([fine, torch.tensor([math.inf, math.nan])]))  # type: ignore[arg-type]
    assert math.isnan(global_norm([torch.tensor([math.inf]), torch.tensor([math.nan])]))  # type: ignore[arg-type]
    assert math.isnan(combine_norms([math.inf, math.nan]))  # type: ignore[arg-type]
    assert global_norm([fine, torch.tensor([-math.inf])]) == math.inf


def test_nothing_to_measure() -> None:
    assert global_norm([]) == 0.0
    assert global_norm([torch.empty(0)]) == 0.0
    assert global_norm([torch.zeros(5)]) == 0.0


def test_parts_combine() -> None:
    one, two = torch.randn(500), torch.randn(700)
    assert combine_norms([global_norm([one]), global_norm([two])]) == pytest.approx(oracle([one, two]), rel=1e-6)
    mixed = combine_norms([global_norm([one]), torch.linalg.vector_norm(two)])
    assert isinstance(mixed, torch.Tensor)
    assert mixed.item() == pytest.approx(oracle([one, two]), rel=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
def test_elements_that_are_all_alike(value: float) -> None:
    """Rounding then goes one way at every addition: torch's own vector norm is off by 0.8 % at 10 million."""
    tensor = torch.tensor(value).expand(3_000_000)
    assert global_norm([tensor]) == pytest.approx(oracle([tensor]), rel=1e-5)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(100_000),
        torch.randn(300_000),
        torch.randn(100_000) * 1e-20,
        torch.randn(100_000) * 1e12,
        torch.randn(100_000) * 0.1 + 1e4,
        -torch.rand(100_000) - 0.5,
        torch.randn(100_000).double() * 1e80,
        torch.randn(100_000).bfloat16(),
        torch.zeros(100_000),
        torch.full((300_000,), -0.37),
        torch.randn(100_000)[:, None].expand(-1, 3),
        torch.randn(300, 301).t(),
        torch.sparse_coo_tensor(torch.arange(50_000)[None] * 3, torch.randn(50_000), (200_000,), check_invariants=True),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_squares_of_what_was_measured(tensor: torch.Tensor) -> None:
    square = sum_of_squares(measure(tensor, Wanted(), scale=torch.tensor(8.0)))
    assert square is not None
    assert math.sqrt(square) == pytest.approx(oracle([tensor]), rel=2e-6)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((100_000,), 1e25),
        torch.full((300_000,), -1e37),
        torch.full((100_000,), 1e200, dtype=torch.float64),
        torch.randn(100_000).double() * 1e200,
        torch.randn(100_000).double() + 1e200,
    ],
    ids=["constant", "larger constant", "float64 constant", "float64", "float64 far from zero"],
)
def test_squares_that_overflow_are_not_known(tensor: torch.Tensor) -> None:
    """The norm is then computed by itself: neither NaN nor an exception."""
    assert sum_of_squares(measure(tensor, Wanted())) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_squares_of_what_is_not_finite(bad: float) -> None:
    tensor = torch.randn(100_000)
    tensor[7] = bad
    assert sum_of_squares(measure(tensor, Wanted())) is None
    assert sum_of_squares(measure(torch.ones(5), Wanted())) is None, "a small one is summed in the background"
    assert sum_of_squares(measure(torch.ones(5000, dtype=torch.int32), Wanted())) is None
