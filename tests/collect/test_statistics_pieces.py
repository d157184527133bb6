"""Pieces: what `measure` must not do to training, merging of micro-batches, and the one copy from a device."""

import math
import threading
import warnings

import numpy as np
import pytest
import torch
from collect.statistics_reference import array_of, assert_statistics, measured, rows_of
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from statsbridge.collect import statistics
from statsbridge.collect.blocks import coprime_stride
from statsbridge.collect.device_kernel import measure_on_device
from statsbridge.collect.piece import SAMPLE_SIZE, SMALL
from statsbridge.collect.statistics import Piece, Reducer, Wanted, measure, pack
from statsbridge.moments import COUNTS, HISTOGRAM_BINS, STATISTICS, merge_rows

BOTH = pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
EVERYTHING = Wanted(histogram=True)


@pytest.fixture
def forced_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)


def force(monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: host)


@BOTH
@pytest.mark.parametrize("size", [1000, 100_000])
def test_the_tensor_may_be_overwritten_right_after(monkeypatch: pytest.MonkeyPatch, host: bool, size: int):
    force(monkeypatch, host)
    tensor = torch.randn(size)
    first = rows_of(measure(tensor, EVERYTHING))
    copy, before = tensor.clone(), torch.randn(size)
    pieces = [measure(copy, EVERYTHING), measure(copy, EVERYTHING, minus=before)]
    difference = array_of(copy - before)
    copy.fill_(math.nan)
    before.fill_(math.nan)
    again = rows_of(*pieces)
    for name in (*COUNTS, *STATISTICS):
        assert again[name][0] == first[name][0]
    assert_statistics({name: values[1] for name, values in again.items()}, difference)


@BOTH
@pytest.mark.parametrize("size", [1000, 100_000])
def test_training_is_left_alone(monkeypatch: pytest.MonkeyPatch, host: bool, size: int):
    force(monkeypatch, host)
    leaf = torch.randn(size, requires_grad=True)
    output = leaf * 2
    before, version, random = output.detach().clone(), output._version, torch.get_rng_state()
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        piece = measure(output, EVERYTHING, scale=torch.ones(1))
        extremes = torch.cat([output.detach(), torch.tensor([math.nan, math.inf, 3e38, -3e38])])
        measure(extremes, EVERYTHING)
        measure(extremes, EVERYTHING, minus=extremes.flip(0))
    assert torch.equal(output, before)
    assert output._version == version
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    parts = piece.parts
    held = [] if parts is None else [parts.values, parts.floats, parts.integers, parts.scale]
    assert all(tensor is None or (tensor.grad_fn is None and not tensor.requires_grad) for tensor in held)
    output.sum().backward()
    assert torch.equal(leaf.grad, torch.full((size,), 2.0))


@BOTH
def test_under_autocast_inference_mode_and_other_defaults(monkeypatch: pytest.MonkeyPatch, host: bool):
    force(monkeypatch, host)
    tensor = 1e4 + 0.1 * torch.randn(100_000)
    right = array_of(tensor)
    results: list[dict[str, float]] = []

    def in_thread() -> None:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(measured(tensor * 1))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    with torch.inference_mode():
        inference = tensor * 1
        results.append(measured(inference))
    results.append(measured(inference))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            results.append(measured(tensor))
    finally:
        torch.set_default_dtype(torch.float32)
    for row in results:
        assert_statistics(row, right)


def test_a_piece_holds_no_more_than_a_sample():
    assert measure(torch.randn(10), Wanted()).nbytes == 40
    assert measure(torch.randn(1_000_000), Wanted()).nbytes <= 1.1 * 4 * SAMPLE_SIZE
    assert measure(torch.randn(1_000_000), Wanted(kl=False)).nbytes == 0
    assert measure(torch.randn(1_000_000), Wanted(kl=False, histogram=True)).nbytes == 8 * HISTOGRAM_BINS
    assert measure(torch.arange(10), Wanted()).nbytes == 0


@given(st.integers(1, 10**8), st.sampled_from([100, SAMPLE_SIZE]))
def test_a_sample_is_about_as_large_as_wanted_and_visits_every_column(elements: int, wanted: int):
    step = coprime_stride(elements, wanted)
    assert math.gcd(step, elements) == 1
    assert min(wanted / 4, elements) <= elements / step < 5 * wanted


elements = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, 9000.0, 1e-38, -3e-40, 2e30, math.nan, math.inf])
splits = st.lists(st.lists(elements, max_size=6), min_size=1, max_size=5)


@given(splits, st.booleans())
def test_micro_batches_are_one_tensor(split: list[list[float]], merge_offline: bool):
    parts = [torch.tensor(part, dtype=torch.float32) for part in split]
    whole = torch.cat(parts)
    pieces = [measure(part, EVERYTHING) for part in parts]
    if merge_offline:
        separate = rows_of(*pieces)
        merged = merge_rows({name: separate[name] for name in (*COUNTS, *STATISTICS)}, np.zeros(len(parts)), 1)
    else:
        merged = rows_of(pieces)
        assert merged["histogram"][0].sum() == torch.isfinite(whole).sum()
    assert not merged["std"][0] < 0
    assert_statistics({name: values[0] for name, values in merged.items()}, array_of(whole))


@pytest.mark.parametrize("spread", [2e-36, 1e-44, 1e30])
def test_micro_batches_whose_spreads_are_worlds_apart(spread: float):
    split = [[0.0, spread], [0.0, 169.0]]
    test_micro_batches_are_one_tensor.hypothesis.inner_test(split, False)


@pytest.mark.parametrize("scale", [1e-280, 1e280])
def test_overflows_are_no_warnings(scale: float):
    """With `python -W error` they would be errors, and the rows of the step be lost."""
    parts = [torch.randn(9000).double() * scale, torch.randn(9000).double(), torch.randn(300).double() / scale]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = rows_of([measure(part, Wanted(histogram=True)) for part in parts])
    assert row["count"][0] == 18_300


@BOTH
def test_large_and_small_micro_batches_with_unequal_means(monkeypatch: pytest.MonkeyPatch, host: bool):
    force(monkeypatch, host)
    parts = [torch.randn(50_000) + 1e3, 0.1 * torch.randn(500), torch.randn(9000) * 30, torch.full((100,), 7.0)]
    row = {name: values[0] for name, values in rows_of([measure(part, EVERYTHING) for part in parts]).items()}
    assert_statistics(row, array_of(torch.cat(parts)))


@BOTH
def test_pieces_added_at_different_times_and_rows_never_added(monkeypatch: pytest.MonkeyPatch, host: bool):
    force(monkeypatch, host)
    first, second = torch.randn(700), torch.randn(20_000) + 3
    reducer = Reducer(Wanted())
    reducer.add([2, 0], [measure(first, Wanted()), measure(torch.arange(5), Wanted())])
    pieces = [measure(second, Wanted()), measure(second, Wanted())]
    pack(pieces)
    reducer.add([2, 1], pieces)
    rows = reducer.finish(4)
    assert_statistics(
        {name: values[2] for name, values in rows.items() if values is not None}, array_of(torch.cat([first, second]))
    )
    assert rows["status"] == ["integer", None, None, None]
    assert rows["count"].tolist() == [5, 20_000, 20_700, 0]
    assert np.isnan([rows[name][[0, 3]] for name in STATISTICS]).all()
    assert rows["kl_unit_gaussian"][1:3].min() > 0
    assert rows["histogram"] is None
    assert Reducer(EVERYTHING).finish(0)["histogram"].shape == (0, HISTOGRAM_BINS)


@BOTH
def test_one_piece_may_stand_in_several_rows(monkeypatch: pytest.MonkeyPatch, host: bool):
    force(monkeypatch, host)
    piece, other = measure(torch.randn(30_000), EVERYTHING), measure(torch.randn(30), EVERYTHING)
    rows = rows_of(piece, other, piece)
    assert rows["std"][0] == rows["std"][2] != rows["std"][1]
    assert rows["kl_unit_gaussian"][0] == rows["kl_unit_gaussian"][2]


def test_an_empty_micro_batch_leaves_no_status():
    rows = rows_of([measure(torch.empty(0), EVERYTHING), measure(torch.randn(10), EVERYTHING)])
    assert rows["status"] == [None]
    assert rows["count"][0] == 10


class Operations(TorchDispatchMode):
    """Writes down every operation and whether its result depends on values in shape or on the host."""

    WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))

    @property
    def waiting(self) -> list[str]:
        return [name for name in self.names if any(word in name for word in self.WAITING)]


@pytest.mark.usefixtures("forced_device")
def test_on_a_device_nothing_is_waited_for_and_one_copy_is_made():
    tensors = [
        torch.randn(100),
        torch.randn(50, 60, 7),
        torch.tensor([math.nan] * 5000),
        torch.randn(70, 80).bfloat16(),
        torch.randn(8000).double(),
        torch.randn(4, 8, 20, 20).to(memory_format=torch.channels_last),
        torch.ones(3).expand(10_000, 3),
    ]
    with Operations() as measuring:
        pieces = [measure(tensor, EVERYTHING) for tensor in tensors]
        pieces.append(measure(tensors[1], EVERYTHING, minus=tensors[1] + 1, scale=torch.tensor(4.0)))
    assert measuring.names
    assert not measuring.waiting
    with Operations() as packing:
        pack(pieces)
    assert not packing.waiting
    # Host and device are one here: what goes to the host is the one conversion that `pack` makes.
    assert sum("_to_copy" in name for name in packing.names) == 1
    with Operations() as repeated:
        pack(pieces)
    assert not repeated.names
    rows = rows_of(*pieces)
    for number, tensor in enumerate(tensors):
        assert_statistics({name: values[number] for name, values in rows.items()}, array_of(tensor))
    assert rows["min"][7] == rows["max"][7] == pytest.approx(-0.25, rel=1e-4) or rows["std"][7] < 1e-6


@pytest.mark.parametrize("size", [SMALL, 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_on_a_device_shapes_depend_on_shapes_only(dtype: torch.dtype, size: int):
    """The same results in shape and dtype from a tensor that has no values at all."""
    real, none = torch.randn(size).to(dtype), torch.empty(size, dtype=dtype, device="meta")
    for wanted in (Wanted(), EVERYTHING):
        there = measure_on_device(real, None, wanted, None)
        nowhere = measure_on_device(none, None, wanted, torch.ones(1, device="meta"))
        for field in ("integers", "floats", "values", "histogram"):
            first, second = getattr(there, field), getattr(nowhere, field)
            assert (first is None) == (second is None), field
            assert first is None or (first.shape, first.dtype) == (second.shape, second.dtype), field
        assert nowhere.scale is not None


@pytest.mark.usefixtures("forced_device")
def test_devices_without_float64_are_not_asked_for_it():
    class NoDouble(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            assert not (isinstance(result, torch.Tensor) and result.dtype == torch.float64), function.name()
            return result

    with NoDouble():
        pieces = [measure(torch.randn(9000).to(dtype), EVERYTHING) for dtype in (torch.float32, torch.float16)]
        pieces.append(measure(torch.randn(9000), EVERYTHING, minus=torch.randn(9000), scale=torch.ones(1)))
        pack(pieces)
    assert rows_of(*pieces)["std"][0] == pytest.approx(1, abs=0.05)


def test_both_ways_agree(monkeypatch: pytest.MonkeyPatch):
    tensors = [torch.randn(200_000).relu(), torch.randn(3000) * 1e-8, torch.rand(64, 64, 9)]
    force(monkeypatch, True)
    host = rows_of(*[measure(tensor, EVERYTHING) for tensor in tensors])
    force(monkeypatch, False)
    device = rows_of(*[measure(tensor, EVERYTHING) for tensor in tensors])
    for name in (*COUNTS, "min", "max", "zero_fraction"):
        assert (host[name] == device[name]).all()
    assert (host["histogram"] == device["histogram"]).all()
    assert device["kl_unit_gaussian"] == pytest.approx(host["kl_unit_gaussian"], rel=1e-3)


def test_a_piece_with_a_status_is_only_a_count():
    piece = measure(torch.ones(3, 4, dtype=torch.int8), EVERYTHING)
    assert piece == Piece("integer", 12)


@pytest.mark.parametrize("numbers", [torch.randn(10), torch.randn(9000)], ids=["small", "large"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_micro_batch_without_numbers_silences_its_row(numbers: torch.Tensor, first: bool):
    """Half of its numbers would be none of the row: it has none, and says why. One without elements changes nothing."""
    nothing, whole = measure(torch.empty(0), EVERYTHING), measure(numbers, EVERYTHING)
    integers = measure(torch.arange(5), EVERYTHING)
    rows = rows_of(*([other, whole] if first else [whole, other] for other in (nothing, integers)), [nothing, integers])
    assert rows["status"] == [None, "integer", "integer"]
    assert list(rows["count"]) == [len(numbers), len(numbers) + 5, 5]
    for name in STATISTICS:
        assert list(np.isnan(rows[name])) == [name == "kl_unit_gaussian" and len(numbers) < 64, True, True], name
