"""`check_data` on digits and on made data: silent on what is clean, and one planted fault of every kind is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import statsbridge
from statsbridge import ConfigError
from statsbridge.debug import check_data
from statsbridge.debug.data import DataResult
from statsbridge.debug.data_finding import DataFinding

Tensors = tuple[torch.Tensor, torch.Tensor]


def made(samples: int = 120, features: int = 4, classes: int = 3, seed: int = 0) -> Tensors:
    """Standardised inputs and labels in random order, as many of each class."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    labels = torch.arange(samples) % classes
    return inputs, labels[torch.randperm(samples, generator=generator)]


def loader(inputs: torch.Tensor, targets: torch.Tensor, **keywords: Any) -> DataLoader[Any]:
    keywords = {"batch_size": 20, "shuffle": True, "generator": torch.Generator().manual_seed(1)} | keywords
    return DataLoader(TensorDataset(inputs, targets), **keywords)


def digits() -> Tensors:
    data = load_digits()
    inputs = torch.tensor(data.data / 16, dtype=torch.float32)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    return inputs[order], torch.tensor(data.target)[order]


def only(result: DataResult) -> DataFinding:
    """The one finding of a result with a single planted fault."""
    (finding,) = result.findings
    return finding


def kinds(result: DataResult) -> list[str]:
    return [finding.kind for finding in result.findings]


# ------------------------------------------------------------------ clean data


def test_clean_data_pass_without_a_finding() -> None:
    result = check_data(
        loader(*made()), validation=loader(*made(60, seed=1)), test=loader(*made(60, seed=2)), classes=3
    )
    assert result.findings == ()
    assert result.passed is True
    assert "Nothing is wrong" in str(result)
    assert "cleanlab" in str(result)


def test_the_moments_are_numpys() -> None:
    inputs, labels = digits()
    result = check_data(loader(inputs, labels, batch_size=100), classes=10)
    moments = result.splits["training"].inputs[""].moments
    exact = inputs.double().numpy()
    assert moments is not None
    np.testing.assert_allclose(moments.mean, exact.mean(axis=0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(moments.std, exact.std(axis=0), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(moments.low, exact.min(axis=0))
    assert result.numbers["input_mean"] == pytest.approx(exact.mean(), rel=1e-12)
    assert result.numbers["input_std"] == pytest.approx(exact.std(), rel=1e-12)


def test_digits_have_three_pixels_that_are_never_written_on() -> None:
    inputs, labels = digits()
    result = check_data(loader(inputs, labels), classes=10)
    finding = only(result)
    assert (finding.kind, finding.severity, finding.value) == ("constant_feature", "warning", 3)
    assert np.flatnonzero(inputs.numpy().std(axis=0) == 0).tolist() == [0, 32, 39]
    assert finding.message.endswith("never change: 0, 32, 39")
    counts = np.bincount(load_digits().target)
    assert result.numbers["classes"] == 10
    assert result.numbers["imbalance"] == pytest.approx(counts.max() / counts.min())


def test_a_batch_loader_and_a_data_set_tell_the_same() -> None:
    inputs, labels = made()
    numbers = [check_data(data).numbers for data in (loader(inputs, labels), TensorDataset(inputs, labels))]
    shared = numbers[0].keys() & numbers[1].keys()
    assert {name: numbers[0][name] for name in shared} == pytest.approx({name: numbers[1][name] for name in shared})


# ------------------------------------------------------------------ one planted fault each


def nan_in_one_sample() -> Any:
    inputs, labels = made()
    inputs[17, 2] = float("nan")
    inputs[17, 3] = float("inf")
    return loader(inputs, labels)


def nan_target() -> Any:
    inputs, _ = made()
    targets = torch.randn(120, 1, generator=torch.Generator().manual_seed(3))
    targets[5] = float("nan")
    return loader(inputs, targets)


def constant_feature() -> Any:
    inputs, labels = made()
    inputs[:, 1] = 0.5
    return loader(inputs, labels)


def all_constant() -> Any:
    inputs, labels = made()
    return loader(torch.ones_like(inputs) + torch.arange(4), torch.zeros_like(labels))


def not_normalised() -> Any:
    inputs, labels = made()
    inputs[:, 2] = inputs[:, 2] * 30 + 100
    return loader(inputs, labels)


def tiny() -> Any:
    inputs, labels = made()
    return loader(inputs * 1e-4, labels)


def uneven() -> Any:
    inputs, labels = made()
    return loader(inputs * torch.tensor([1.0, 1.0, 1.0, 1e-4]), labels)


def raw_bytes() -> Any:
    _, labels = made()
    pixels = torch.randint(0, 256, (120, 3, 6, 6), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    return loader(pixels, labels)


def raw_pixels() -> Any:
    _, labels = made()
    pixels = torch.randint(0, 256, (120, 3, 6, 6), generator=torch.Generator().manual_seed(4)).float()
    return loader(pixels, labels)


def double_inputs() -> Any:
    inputs, labels = made()
    return loader(inputs.double(), labels)


def double_targets() -> Any:
    inputs, _ = made()
    return loader(inputs, torch.randn(120, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))


def shapes() -> Any:
    inputs, labels = made()
    return _Listed([(inputs[i, : 3 + i % 2], labels[i]) for i in range(120)])


def dtypes() -> Any:
    inputs, labels = made()
    return [(inputs[:60], labels[:60]), (inputs[60:].half(), labels[60:])]


def copies() -> Any:
    inputs, labels = made()
    inputs[40], labels[40] = inputs[7], labels[7]
    return loader(inputs, labels)


def imbalanced() -> Any:
    inputs, labels = made(200, classes=2)
    labels[:] = 0
    labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))[:15]] = 1
    return loader(inputs, labels)


def one_class() -> Any:
    inputs, labels = made()
    return loader(inputs, torch.zeros_like(labels))


def missing_class() -> Any:
    inputs, labels = made()
    labels[labels == 1] = 3
    return loader(inputs, labels)


def from_one() -> Any:
    inputs, labels = made()
    return loader(inputs, labels + 1)


def negative() -> Any:
    inputs, labels = made()
    labels[3] = -1
    return loader(inputs, labels)


def float_labels() -> Any:
    inputs, labels = made()
    return loader(inputs, labels.float())


def short_labels() -> Any:
    inputs, labels = made()
    return loader(inputs, labels.int())


def labels_in_columns() -> Any:
    inputs, labels = made()
    return loader(inputs, labels[:, None])


def constant_target() -> Any:
    inputs, _ = made()
    return loader(inputs, torch.full((120, 1), 2.5))


def last_of_one() -> Any:
    return loader(*made(121))


def in_order_of_class() -> Any:
    inputs, labels = made()
    return loader(inputs, labels.sort().values, shuffle=False)


def in_order() -> Any:
    return loader(*made(), shuffle=False)


def nothing() -> Any:
    return loader(*made(10), drop_last=True)


def broken_sample() -> Any:
    inputs, labels = made()
    return _Broken(inputs, labels, 33)


def broken_batch() -> Any:
    inputs, labels = made()
    return DataLoader(_Broken(inputs, labels, 33), batch_size=20)


def strange_part() -> Any:
    inputs, labels = made()
    return [({"x": inputs[i : i + 20], "edges": object()}, labels[i : i + 20]) for i in range(0, 120, 20)]


class _Listed(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class _Broken(Dataset[Any]):
    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, broken: int) -> None:
        self.inputs, self.labels, self.broken = inputs, labels, broken

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError(f"image {index} is truncated")
        return self.inputs[index], self.labels[index]


@pytest.mark.parametrize(
    ("data", "kind", "severity", "value", "said"),
    [
        (nan_in_one_sample, "nonfinite_input", "critical", 2, "1 NaN and 1 infinite values in 1 sample and 2 features: "
         "sample 17, feature 2, sample 17, feature 3"),
        (nan_target, "nonfinite_target", "critical", 1, "sample 5"),
        (constant_feature, "constant_feature", "warning", 1, "1 feature of 4 that never changes: 1"),
        (not_normalised, "large_input", "warning", None, "1 of 4 features; the worst, feature 2: mean 1"),
        (tiny, "small_input", "warning", None, "tiny"),
        (uneven, "uneven_features", "warning", None, "feature 3"),
        (raw_bytes, "uint8_input", "warning", 255, "uint8, 0 to 255"),
        (raw_pixels, "unscaled_pixels", "warning", 255, "0 to 255"),
        (double_inputs, "float64_input", "warning", None, "float64"),
        (double_targets, "float64_target", "warning", None, "float64"),
        (shapes, "shapes_differ", "warning", 2, "2 shapes: [3], [4]"),
        (dtypes, "dtypes_differ", "warning", 2, "float32, float16"),
        (copies, "duplicates", "warning", 1, "1 sample of 120 equals an earlier one to the bit"),
        (imbalanced, "class_imbalance", "warning", 185 / 15, "185 of class 0 and 15 of class 1, 12.3 : 1"),
        (one_class, "single_class", "critical", 1, "class 0 in all samples"),
        (missing_class, "missing_classes", "warning", 1, "no sample of class 1"),
        (from_one, "label_out_of_range", "warning", 3, "from 1 to 3"),
        (negative, "label_out_of_range", "critical", -1, "negative class labels, down to -1"),
        (short_labels, "label_dtype", "warning", None, "int32"),
        (labels_in_columns, "label_shape", "warning", None, "[batch, 1]"),
        (constant_target, "constant_target", "critical", None, "2.5 in all samples"),
        (last_of_one, "small_last_batch", "warning", 1, "last batch has 1 sample"),
        (in_order_of_class, "sorted_labels", "warning", 2, "2 changes"),
        (in_order, "not_shuffled", "info", None, "same order"),
        (nothing, "empty", "critical", None, "no sample"),
        (broken_sample, "unreadable", "critical", 1, "sample 33 could not be read: OSError: image 33 is truncated"),
        (strange_part, "not_looked_at", "info", None, "edges (object)"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)  # fmt: skip
def test_one_planted_fault_is_found(
    data: Callable[[], Any], kind: str, severity: str, value: float | None, said: str
) -> None:
    result = check_data(data())
    found = [finding for finding in result.findings if finding.kind != "large_input" or kind == "large_input"]
    finding = found[0]
    assert (finding.kind, finding.severity) == (kind, severity), result
    assert len(found) == 1, result
    assert said in finding.message
    if value is not None:
        assert finding.value == pytest.approx(value)
    assert result.passed is (severity != "critical")
    assert finding.suggestion
    assert " ".join(finding.message.split()) in " ".join(str(result).split())


def test_inputs_that_are_all_alike_are_also_copies() -> None:
    result = check_data(all_constant())
    assert kinds(result) == ["constant_feature", "single_class", "duplicates"]
    assert "4 features of 4" in result.findings[0].message
    assert result.findings[2].value == 119


def test_what_a_loader_cannot_read_ends_it_and_names_the_samples() -> None:
    result = check_data(broken_batch())
    unreadable = result.findings[0]
    assert unreadable.kind == "unreadable"
    assert "batch 1 (samples 20, 21, 22" in unreadable.message
    assert "image 33 is truncated" in unreadable.message
    assert result.numbers["training_samples"] == 20


def test_the_place_of_a_nan_is_the_data_sets_own_index_in_a_shuffled_loader() -> None:
    inputs, labels = made()
    inputs[[3, 99], 1] = float("nan")
    for workers in (0, 1):
        result = check_data(loader(inputs, labels, num_workers=workers))
        assert sorted(only(result).indices) == [3, 99]


def test_channels_of_images_are_told_apart() -> None:
    images = torch.randn(40, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    images[7, 1, 2, 2] = float("inf")
    result = check_data(loader(images, made(40)[1]))
    assert only(result).message.endswith("in 1 sample and 1 channel: sample 7, channel 1")
    moments = result.splits["training"].inputs[""].moments
    assert moments is not None
    assert moments.count.tolist() == [1000, 999, 1000]
    colours_last = check_data(loader(images.permute(0, 2, 3, 1), made(40)[1]))
    assert only(colours_last).message == only(result).message


# ------------------------------------------------------------------ classes that the user knows


@pytest.mark.parametrize(
    ("change", "kind", "severity", "said"),
    [
        (lambda labels: labels + 1, "label_out_of_range", "critical", "counts its classes from 1 to 3"),
        (
            lambda labels: labels + (labels == 2) * 5,
            "label_out_of_range",
            "critical",
            "runs from 0 to 7; 3 classes",
        ),
        (lambda labels: labels.float(), "float_labels", "critical", "float32"),
        (lambda labels: labels % 2, "missing_classes", "warning", "class 2"),
    ],
)
def test_labels_against_the_number_of_classes(
    change: Callable[[torch.Tensor], torch.Tensor], kind: str, severity: str, said: str
) -> None:
    inputs, labels = made()
    found = check_data(loader(inputs, change(labels)), classes=3).findings
    assert (found[0].kind, found[0].severity) == (kind, severity)
    assert said in found[0].message
    # A class out of range leaves its own place empty.
    assert {finding.kind for finding in found[1:]} <= {"missing_classes"}


def test_what_losses_ignore_is_no_class() -> None:
    inputs, labels = made()
    labels[:10] = -100
    assert kinds(check_data(loader(inputs, labels), classes=3)) == []


@pytest.mark.parametrize(
    "targets",
    [
        torch.nn.functional.one_hot(made()[1], 3).float(),
        torch.softmax(torch.randn(120, 3, generator=torch.Generator().manual_seed(0)), dim=1),
        torch.randint(0, 3, (120, 6, 6), generator=torch.Generator().manual_seed(0)),
    ],
    ids=["one-hot", "probabilities", "a label for each pixel"],
)
def test_other_kinds_of_labels_are_clean(targets: torch.Tensor) -> None:
    assert kinds(check_data(loader(made()[0], targets), classes=3)) == []


def test_zero_and_one_as_floats_are_right_for_a_sigmoid() -> None:
    inputs, labels = made(classes=2)
    assert kinds(check_data(loader(inputs, labels.float()), classes=2)) == []


def test_a_regression_has_no_classes() -> None:
    targets = torch.randn(120, 1, generator=torch.Generator().manual_seed(5))
    result = check_data(loader(made()[0], targets))
    assert kinds(result) == []
    assert "classes" not in result.numbers


def test_one_hot_rows_are_counted_as_classes() -> None:
    inputs, labels = made()
    result = check_data(loader(inputs, torch.nn.functional.one_hot(labels, 3).float()))
    assert result.numbers["classes"] == 3


# ------------------------------------------------------------------ copies


def test_copies_within_a_split_and_their_labels() -> None:
    inputs, labels = made()
    inputs[[40, 50, 60]] = inputs[[7, 7, 8]]
    labels[[7, 8, 40, 50, 60]] = torch.tensor([0, 1, 0, 2, 1])
    result = check_data(TensorDataset(inputs, labels))
    duplicates, conflict = result.findings
    assert (duplicates.kind, duplicates.value) == ("duplicates", 3)
    assert duplicates.message.endswith("40 (= 7), 50 (= 7), 60 (= 8)")
    assert (conflict.kind, conflict.value) == ("conflicting_targets", 1)
    assert result.numbers["duplicates"] == 3


def test_leakage_between_splits_of_different_kinds() -> None:
    inputs, labels = made(200)
    others, other_labels = made(50, seed=9)
    others[[3, 4]] = inputs[[100, 150]]
    result = check_data(loader(inputs, labels), validation=TensorDataset(others, other_labels))
    finding = only(result)
    assert (finding.kind, finding.severity, finding.split) == ("leakage", "critical", "validation")
    assert finding.value == pytest.approx(2 / 50)
    assert "3 (= 100 there), 4 (= 150 there)" in finding.message
    splits = {"validation": TensorDataset(inputs, labels), "test": TensorDataset(others, other_labels)}
    tests = check_data(loader(*made(50, seed=8)), **splits)
    assert [(one.kind, one.split) for one in tests.findings] == [("leakage", "test")]
    assert "validation data too" in tests.findings[0].message


def test_one_leaked_sample_of_very_many_is_a_warning() -> None:
    inputs, labels = made(50)
    others, other_labels = made(200, seed=9)
    others[3] = inputs[10]
    finding = only(check_data(loader(inputs, labels), validation=TensorDataset(others, other_labels)))
    assert (finding.kind, finding.severity, finding.value) == ("leakage", "warning", 1 / 200)


def test_a_sampler_that_draws_with_replacement_makes_no_copies() -> None:
    inputs, labels = made()
    sampler = WeightedRandomSampler([1.0] * 120, 120, generator=torch.Generator().manual_seed(0))
    result = check_data(DataLoader(TensorDataset(inputs, labels), batch_size=20, sampler=sampler))
    assert kinds(result) == []


def test_text_is_compared_without_the_padding_of_its_batch() -> None:
    words = [{"text": text, "label": number % 2} for number, text in enumerate(["a", "long text", "b", "a", "c", "d"])]
    result = check_data(_Listed(words))
    assert [finding.kind for finding in result.findings] == ["duplicates", "conflicting_targets"]
    assert "3 (= 0)" in result.findings[0].message


# ------------------------------------------------------------------ splits that differ


def test_a_validation_set_that_is_normalised_otherwise() -> None:
    others, labels = made(60, seed=1)
    finding = only(check_data(loader(*made()), validation=loader(others * 0.25 + 0.5, labels)))
    assert (finding.kind, finding.split, finding.severity) == ("split_shift", "validation", "warning")
    stretched = only(check_data(loader(*made()), validation=loader(others * 3, labels)))
    std, other = made()[0].double().std(correction=0), (others * 3).double().std(correction=0)
    assert stretched.value == pytest.approx(float(other / std))


def test_a_split_of_another_shape_or_type() -> None:
    others, labels = made(60, seed=1)
    assert kinds(check_data(loader(*made()), validation=loader(others[:, :3], labels))) == ["split_form"]
    assert "split_form" in kinds(check_data(loader(*made()), validation=loader(others.double(), labels)))


def test_classes_that_the_training_data_lack() -> None:
    others, labels = made(60, seed=1)
    finding = only(check_data(loader(*made()), validation=loader(others, labels + (labels == 2))))
    assert (finding.kind, finding.value) == ("unseen_classes", 1)
    assert finding.message.endswith("lack: 3")


def test_constant_features_of_a_small_validation_set_are_not_told() -> None:
    others, labels = made(30, seed=1)
    others[:, 0] = 0.1
    assert kinds(check_data(loader(*made()), validation=loader(others, labels))) == []


# ------------------------------------------------------------------ structures


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        super().__init__()
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def structures() -> dict[str, Any]:
    inputs, labels = made()
    cuts = [slice(start, start + 20) for start in range(0, 120, 20)]
    return {
        "list of pairs": [(inputs[cut], labels[cut]) for cut in cuts],
        "dicts": [{"x": inputs[cut], "labels": labels[cut]} for cut in cuts],
        "named tuples": [Pair(inputs[cut], labels[cut]) for cut in cuts],
        "dataclasses": [Record(inputs[cut], labels[cut]) for cut in cuts],
        "nested": [({"a": inputs[cut], "b": [inputs[cut] * 2]}, {"labels": labels[cut]}) for cut in cuts],
        "numpy": [(inputs[cut].numpy(), labels[cut].numpy()) for cut in cuts],
        "lists of samples": [
            ([row[: 2 + i % 2] for i, row in enumerate(inputs[cut])], labels[cut].tolist()) for cut in cuts
        ],
        "stream": Stream(list(zip(inputs, labels, strict=True))),
        "loader of a stream": DataLoader(Stream(list(zip(inputs, labels, strict=True))), batch_size=20),
        "python numbers": _Listed([(row.tolist(), int(label)) for row, label in zip(inputs, labels, strict=True)]),
        "three parts": [(inputs[cut], inputs[cut] * 2, labels[cut]) for cut in cuts],
    }


@pytest.mark.parametrize("name", structures())
def test_any_structure_of_batches(name: str) -> None:
    result = check_data(structures()[name], classes=3)
    assert result.numbers["training_samples"] == 120
    assert result.numbers["classes"] == 3
    assert result.passed
    # Lists of numbers are float64, and samples of two lengths are told as such.
    told = {"python numbers": ["float64_input"], "lists of samples": ["shapes_differ"]}.get(name, [])
    assert kinds(result) == told


def test_the_parts_can_be_named() -> None:
    inputs, labels = made()
    batches = [{"features": inputs, "truth": labels, "unused": torch.full((120, 1), torch.nan)}]
    result = check_data(batches, inputs="features", targets=lambda batch: batch["truth"], classes=3)
    assert kinds(result) == []
    assert result.numbers["classes"] == 3
    unlabelled = check_data(batches, inputs="features", targets=lambda batch: None)
    assert unlabelled.splits["training"].targets == {}
    with pytest.raises(ConfigError, match=r"inputs='image' is not in a batch: it is a dict with features, tr"):
        check_data(batches, inputs="image")


def test_tokens_with_their_mask_are_clean() -> None:
    tokens = torch.randint(5, 900, (120, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 1  # each begins with the same token
    labels = made()[1]
    batches = [
        {"input_ids": tokens[cut], "attention_mask": torch.ones(20, 12).long(), "labels": labels[cut]}
        for cut in (slice(start, start + 20) for start in range(0, 120, 20))
    ]
    assert kinds(check_data(batches, classes=3)) == []


def test_packed_sequences_have_more_rows_than_samples() -> None:
    sequences = [torch.randn(1 + i % 5, 3) for i in range(20)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    result = check_data([(packed, torch.arange(20) % 2)], classes=2)
    assert result.numbers["training_samples"] == 20
    assert result.numbers["classes"] == 2
    assert kinds(result) == ["not_looked_at"]


def test_bfloat16_and_half_are_read() -> None:
    inputs, labels = made()
    assert kinds(check_data(loader(inputs.bfloat16(), labels))) == []
    assert kinds(check_data(loader(inputs.half(), labels))) == []


# ------------------------------------------------------------------ what is shown


def test_five_samples_with_their_labels() -> None:
    inputs, labels = made()
    text = str(check_data(TensorDataset(inputs, labels)))
    for index in range(5):
        low, high = float(inputs[index].min()), float(inputs[index].max())
        assert f"sample {index}: [4] {low:.4g} to {high:.4g} → {labels[index]}" in text
    assert "sample 5:" not in text


def test_the_figure_has_the_samples_the_features_and_the_classes() -> None:
    images = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    labels = made(40)[1]
    figure = check_data(TensorDataset(images, labels)).figure()
    assert [trace.type for trace in figure.data] == ["heatmap"] * 5 + ["scatter", "bar"]
    np.testing.assert_allclose(np.array(figure.data[2].z, float), images[2, 0], rtol=1e-6)
    assert list(figure.data[6].y) == torch.bincount(labels).tolist()
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert titles[:5] == [f"sample {index}: {labels[index]}" for index in range(5)]
    lines = check_data(TensorDataset(*made())).figure()
    np.testing.assert_allclose(lines.data[0].y, made()[0][0], rtol=1e-6)


def test_labels_are_text_in_the_figure() -> None:
    samples = [(torch.randn(3), "<b>cat</b>" if i % 2 else "dog") for i in range(20)]
    figure = check_data(_Listed(samples)).figure()
    assert list(figure.data[-1].x) == ["&lt;b&gt;cat&lt;/b&gt;", "dog"]


def test_the_findings_as_a_file(tmp_path: Any) -> None:
    check_data(nan_in_one_sample()).to_csv(tmp_path / "findings.csv")
    header, row = (tmp_path / "findings.csv").read_text().splitlines()
    assert header == "split,severity,kind,part,value,threshold,message,suggestion"
    assert row.startswith("training,critical,nonfinite_input,,2.0,0.0,")


def test_the_numbers_go_into_a_run(tmp_path: Any) -> None:
    result = check_data(loader(*made()))
    run = statsbridge.init(torch.nn.Linear(4, 3), dir=tmp_path)
    result.log_to(run)
    run.finish()
    scalars = statsbridge.load(run.path).scalars
    recorded = dict(zip(scalars["name"].to_pylist(), scalars["value"].to_pylist(), strict=True))
    assert recorded["check_data/training_samples"] == 120
    assert recorded["check_data/passed"] == 1


# ------------------------------------------------------------------ as found


def test_generators_and_the_loader_are_as_found() -> None:
    inputs, labels = made()

    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 120

        def __getitem__(self, index: int) -> Any:
            return inputs[index] + torch.randn(4) + float(np.random.rand()) + random.random(), labels[index]

    for generator in (None, torch.Generator().manual_seed(3)):
        data = DataLoader(Noisy(), batch_size=20, shuffle=True, generator=generator)
        before = states(generator)
        check_data(data, validation=data, limit=30)
        assert states(generator) == before
        assert data._iterator is None


def states(generator: torch.Generator | None) -> list[Any]:
    held = [torch.get_rng_state()] + ([] if generator is None else [generator.get_state()])
    return [*(state.tolist() for state in held), random.getstate(), str(np.random.get_state())]


def test_a_loader_in_the_middle_of_an_epoch_goes_on() -> None:
    data = loader(*made())
    expected = [batch[0] for batch in loader(*made())]
    running = iter(data)
    first = next(running)[0]
    check_data(data)
    for wanted, got in zip(expected, [first, *(batch[0] for batch in running)], strict=True):
        assert torch.equal(wanted, got)


def test_only_so_many_samples_are_read() -> None:
    read: list[int] = []

    class Counted(Dataset[Any]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return torch.randn(4), index % 3

    result = check_data(Counted(), limit=50)
    assert result.numbers["training_samples"] == 50
    assert read == list(range(50))
    assert "not all were read" in str(result)
    assert check_data(loader(*made(121)), limit=40).findings[0].kind == "small_last_batch"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (iter([1]), "can be read only once"),
        (3, "data is a int: give a DataLoader"),
        (torch.zeros(3, 2), r"TensorDataset\(inputs, targets\)"),
        ({"x": 1}, "data is a dict"),
    ],
)
def test_what_cannot_be_read_is_said(data: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_data(data)


@pytest.mark.parametrize("keywords", [{"classes": 1}, {"limit": 0}, {"classes": 2.5}, {"inputs": 1.5}])
def test_wrong_arguments_are_said(keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keywords))):
        check_data(loader(*made()), **keywords)


def test_labels_that_are_large_numbers_cost_nothing_and_are_shown_in_full() -> None:
    inputs, labels = made(classes=2)
    result = check_data(loader(inputs, labels * 10**9))
    finding = next(one for one in result.findings if one.kind == "missing_classes")
    assert finding.value == 10**9 - 1
    assert "no sample of class 1, class 2, class 3, class 4, class 5 and 999,999,994 more" in finding.message
    assert "→ 1000000000" in str(result)


class Buckets(torch.utils.data.Sampler[list[int]]):
    """Batches of indices in random order, as samplers of sequences of like lengths draw them."""

    def __iter__(self) -> Any:
        order = torch.randperm(64).tolist()
        return (order[start : start + 8] for start in range(0, 64, 8))

    def __len__(self) -> int:
        return 8


def test_batches_drawn_by_a_sampler_of_the_users_own_are_not_called_unshuffled() -> None:
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
    assert "not_shuffled" in {one.kind for one in check_data(DataLoader(data, batch_size=8)).findings}
    assert "not_shuffled" not in {one.kind for one in check_data(DataLoader(data, batch_sampler=Buckets())).findings}


def test_a_data_set_without_a_length_is_said() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return torch.randn(3), 1

    with pytest.raises(ConfigError, match="Endless without __len__"):
        check_data(Endless())
