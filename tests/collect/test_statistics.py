"""Every statistic against float64 scipy and numpy, on the host's way and on the accelerator's."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from collect.statistics_reference import array_of, assert_statistics, measured, rows_of

from statsbridge.collect import statistics
from statsbridge.collect.piece import SMALL
from statsbridge.collect.statistics import STATISTICS, Wanted, measure
from statsbridge.moments import ZERO_BIN, histogram_edges


@pytest.fixture(params=["team", "one core", "device"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All ways of measuring: with a team of threads, on one core, and that of accelerators, here in host memory."""
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: request.param != "device")
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one core" else 2)
    yield request.param
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


DISTRIBUTIONS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": normal,
    "far from zero": lambda n: 1e4 + 0.1 * normal(n),
    "uniform": lambda n: uniform(n) * 2 - 1,
    "laplace": lambda n: -torch.log(uniform(n) + 1e-9) * torch.sign(normal(n, seed=1)),
    "lognormal": lambda n: normal(n).exp(),
    "relu": lambda n: normal(n).relu(),
    "negative": lambda n: -normal(n).abs() - 0.5,
    "tiny": lambda n: 1e-11 * normal(n),
    "huge": lambda n: 1e12 * normal(n),
    "nearly overflowing": lambda n: 1e37 * normal(n),
    "denormal": lambda n: 1e-36 * normal(n),
    "one spike": lambda n: torch.cat([torch.zeros(n - 1), torch.tensor([1e-3])]),
    "sparse gradient": lambda n: normal(n) * 1e-9 * (uniform(n) < 1e-3),
    "two numbers": lambda n: 0.3 * torch.sign(normal(n)),
    "drifting": lambda n: normal(n) + torch.arange(n) / n * 50,
}


@pytest.mark.parametrize("size", [3, 1000, SMALL, SMALL + 1, 200_003])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str, size: int):
    tensor = DISTRIBUTIONS[name](size)
    assert_statistics(measured(tensor), array_of(tensor))


@pytest.mark.slow
def test_ten_million_elements():
    for tensor in (normal(10_000_000), 1e4 + 0.1 * normal(10_000_000), 0.37 * torch.sign(normal(10_000_000))):
        assert_statistics(measured(tensor), array_of(tensor))


@pytest.mark.parametrize("size", [700, 100_000])
@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (torch.float64, lambda n: normal(n).double()),
        (torch.float64, lambda n: 1e9 + normal(n).double()),
        (torch.float64, lambda n: 1e80 * normal(n).double()),
        (torch.float16, lambda n: 300 * normal(n)),
        (torch.float16, lambda n: 65504 * (uniform(n) * 2 - 1)),
        (torch.float16, lambda n: 1e-6 * normal(n)),
        (torch.bfloat16, normal),
        (torch.bfloat16, lambda n: 1e4 + 100 * normal(n)),
        (torch.float8_e5m2, normal),
    ],
)
def test_dtypes(dtype: torch.dtype, make: Callable[[int], torch.Tensor], size: int):
    tensor = make(size).to(dtype)
    assert_statistics(measured(tensor), array_of(tensor))


@pytest.mark.parametrize("size", [60, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_and_infinities_are_counted_and_left_out(dtype: torch.dtype, size: int):
    tensor = normal(size)
    tensor[7], tensor[size // 2], tensor[size - 1] = math.nan, math.inf, -math.inf
    tensor[20:25] = math.nan
    tensor = tensor.to(dtype)
    row = measured(tensor)
    assert (row["nan_count"], row["inf_count"], row["status"]) == (6, 2, None)
    assert_statistics(row, array_of(tensor))
    assert row["histogram"].sum() == size - 8
    if size > SMALL:
        assert row["kl_unit_gaussian"] < 0.02


@pytest.mark.parametrize("size", [700, 5000, 140_000])
@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-60, 1e60, 1e100, 1e200, 1e300])
def test_float64_beyond_what_float32_can_hold(scale: float, size: int):
    for values in (normal(size).double(), normal(size).double() + 2, normal(size).double().relu()):
        row, usual = measured(values * scale), measured(values)
        assert_statistics(row, array_of(values * scale))
        if scale < 1:  # beyond, the square of the mean and the spread is all that is left of the divergence
            assert shape_of(row) == pytest.approx(shape_of(usual), abs=0.01)


def shape_of(row: dict[str, float]) -> float:
    """What the divergence says beside mean and spread."""
    gaussian = 0.5 * (row["mean"] ** 2 + row["std"] ** 2 - 1) - math.log(row["std"])
    return row["kl_unit_gaussian"] - gaussian


@pytest.mark.parametrize("size", [5, 100_000])
def test_no_finite_element_leaves_nulls(size: int):
    row = measured(torch.full((size,), math.nan))
    assert (row["count"], row["nan_count"]) == (size, size)
    assert all(math.isnan(row[name]) for name in STATISTICS)
    assert row["histogram"].sum() == 0


@pytest.mark.parametrize("size", [1, 2, 64, 100_000])
@pytest.mark.parametrize("value", [0.1, 0.0, -3.0, 1e30, 1e-30])
def test_constants_have_exactly_no_spread(size: int, value: float):
    tensor = torch.full((size,), value)
    row = measured(tensor)
    assert row["std"] == 0
    assert row["mean"] == row["min"] == row["max"] == float(tensor[0])
    assert all(math.isnan(row[name]) for name in ("skewness", "kurtosis", "kl_unit_gaussian"))
    assert_statistics(row, array_of(tensor))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "strided slice": lambda x: x[:, ::2, 1:-1, ::3],
    "columns": lambda x: x.flatten(1)[:, :5],
    "expanded": lambda x: x[:, :, :1, :1].expand(-1, -1, 7, 5),
    "expanded scalar": lambda x: x[0, 0, 0, 0].expand(3000, 50),
    "no dimensions": lambda x: x[0, 0, 0, 0],
    "not from the beginning": lambda x: x.flatten()[17:],
    "negated view": torch._neg_view,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype):
    for shape in ((4, 6, 5, 7), (4, 24, 40, 66)):
        tensor = LAYOUTS[layout](normal(*shape).to(dtype))
        assert_statistics(measured(tensor), array_of(tensor))


def test_an_expanded_gradient_is_not_written_out():
    gradient = torch.tensor(0.25).expand(40_000, 50_000)
    row = measured(gradient)
    assert row["count"] == 2_000_000_000
    assert row["l2"] == pytest.approx(0.25 * math.sqrt(2e9))
    assert (row["std"], row["abs_mean"]) == (0, 0.25)
    assert row["histogram"].sum() == 2_000_000_000


@pytest.mark.parametrize("size", [600, 150_000])
def test_the_difference_of_two_tensors(size: int):
    before, after = normal(size), normal(size) + 1e-4 * normal(size, seed=1)
    assert_statistics(measured(after, minus=before), array_of(after) - array_of(before))
    half = after.bfloat16()
    assert_statistics(measured(half, minus=before.bfloat16()), array_of(half) - array_of(before.bfloat16()))
    assert_statistics(measured(after.double(), minus=before), array_of(after) - array_of(before))


def test_the_difference_of_tensors_in_different_layouts():
    before, after = normal(30, 8, 25, 27), normal(30, 8, 25, 27, seed=1)
    others = (before.to(memory_format=torch.channels_last), before.transpose(2, 3).contiguous().transpose(2, 3))
    for other in others:
        assert_statistics(measured(after, minus=other), array_of(after - before))
        assert_statistics(measured(other, minus=after), array_of(before - after))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [600, 5000, 150_000])
def test_the_difference_of_tensors_of_eight_bits(size: int, dtype: torch.dtype):
    after, before = normal(size).to(dtype), normal(size, seed=1).to(dtype)
    assert_statistics(measured(after, minus=before), array_of(after.float()) - array_of(before.float()))


@pytest.mark.parametrize("size", [600, 150_000])
def test_a_scaled_gradient_is_measured_unscaled(size: int):
    gradient = (normal(size) * 1e-6 * 65536).half()
    row = measured(gradient, scale=torch.tensor([65536.0]))
    right = array_of(gradient) / 65536
    assert_statistics(row, right)
    assert (row["histogram"] == _counted(right)).all()


def test_the_scale_is_that_of_the_moment():
    scale = torch.tensor(4.0)
    piece = measure(normal(5000), Wanted(), scale=scale)
    scale.fill_(1.0)
    assert rows_of(piece, wanted=Wanted())["std"][0] == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("size", [900, 150_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_histogram(dtype: torch.dtype, size: int):
    exponents = torch.randint(-140, 120, (size,), generator=torch.Generator().manual_seed(0))
    tensor = (torch.sign(normal(size)) * torch.exp2(exponents.double())).to(dtype)
    # Powers of two lie on the edges; their neighbours in float64 and other values do not.
    tensor[1::3] *= 1 + uniform(len(tensor[1::3])).to(dtype)
    tensor[::50] = 0.0
    tensor[1::50] = -0.0
    values = array_of(tensor)
    finite = values[np.isfinite(values)]
    row = measured(tensor)
    assert row["histogram"].dtype == np.int64
    assert (row["histogram"] == _counted(finite)).all()


def _counted(values: np.ndarray) -> np.ndarray:
    """The histogram by numpy, whose bins include their lower edge; ours mirror that below zero."""
    powers = np.concatenate((histogram_edges()[ZERO_BIN + 1 :], [np.inf]))
    positive = np.histogram(values[values > 0], np.concatenate(([1e-320], powers)))[0]
    negative = np.histogram(-values[values < 0], np.concatenate(([1e-320], powers)))[0]
    return np.concatenate((negative[::-1], [(values == 0).sum()], positive))


def test_sparse_gradients_count_their_implied_zeros():
    embedding = torch.nn.Embedding(500, 40, sparse=True)
    embedding(torch.tensor([3, 3, 7, 200])).pow(2).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    right = array_of(gradient.to_dense())
    row = measured(gradient)
    assert_statistics(row, right)
    assert row["zero_fraction"] == 1 - 3 / 500
    assert row["histogram"][ZERO_BIN] == 497 * 40
    assert not gradient.is_coalesced()


@pytest.mark.parametrize("compress", [torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc, torch.Tensor.to_sparse])
def test_compressed_tensors(compress: Callable[[torch.Tensor], torch.Tensor]):
    dense = normal(300, 70) * (uniform(300, 70) < 0.4)
    assert_statistics(measured(compress(dense)), array_of(dense))
    empty = compress(torch.zeros(30, 7))
    assert_statistics(measured(empty), np.zeros(210))


@pytest.mark.parametrize(
    ("tensor", "status"),
    [
        (torch.arange(6), "integer"),
        (torch.ones(6, dtype=torch.bool), "integer"),
        (torch.ones(6, dtype=torch.complex64), "complex"),
        (torch.ones(2, 3, device="meta"), "meta"),
        (torch.ones(6).to_mkldnn() if torch.backends.mkldnn.is_available() else torch.arange(6), None),
        (torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.qint8), "unsupported"),
    ],
)
def test_tensors_without_numbers_have_a_count_and_a_status(tensor: torch.Tensor, status: str | None):
    row = measured(tensor)
    assert row["status"] == (status or row["status"])
    assert row["status"] is not None
    assert row["count"] == 6
    assert all(math.isnan(row[name]) for name in STATISTICS)


def test_nothing_at_all():
    assert measured(torch.empty(0, 3))["status"] == "empty"
    assert measured(torch.nn.parameter.UninitializedParameter())["status"] == "unsupported"
    assert measured(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))["status"] == "unsupported"


def test_inside_a_function_transform_nothing_is_measured_and_nothing_breaks():
    statuses = []

    def function(x: torch.Tensor) -> torch.Tensor:
        statuses.append(measure(x, Wanted()).status)
        return x * 2

    torch.func.vmap(function)(torch.ones(3, 4))
    assert statuses == ["unsupported"]


def test_plain_subclasses_are_measured_and_wrappers_are_not():
    class Named(torch.Tensor):
        pass

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return NotImplemented

    assert_statistics(measured(normal(100).as_subclass(Named)), array_of(normal(100)))
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    assert measure(wrapper, Wanted()).status == "unsupported"
