import numpy as np
import pytest
import torch

from statsbridge import ConfigError, Sampling
from statsbridge.collect.sampling import StepLabels


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(every=1), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (Sampling(every=5), [0, 5, 10]),
        (Sampling(every=5, first=3), [0, 1, 2, 5, 10]),
        (Sampling(every=100), [0]),
        (Sampling(), [0, 10]),
    ],
)
def test_sampled_iterations(sampling: Sampling, expected: list[int]) -> None:
    assert [iteration for iteration in range(12) if sampling.sampled(iteration)] == expected


@pytest.mark.parametrize("every", [0, -1, 2.0, "10", None, True])
def test_every_must_be_a_positive_whole_number(every: object) -> None:
    with pytest.raises(ConfigError, match=r"every=.*whole number of at least 1"):
        Sampling(every=every)  # type: ignore[arg-type]


def test_first_must_not_be_negative() -> None:
    with pytest.raises(ConfigError, match="first=-1"):
        Sampling(every=1, first=-1)


def test_numpy_integers_are_whole_numbers() -> None:
    assert Sampling(every=np.int64(3)).sampled(9)  # type: ignore[arg-type]
    assert StepLabels(0).next(np.int32(4)) == (4, None)


def test_labels_count_up_and_follow_the_users() -> None:
    labels = StepLabels(5)
    assert labels.current == 5
    assert [labels.next(given)[0] for given in (None, None, 10, None, 20)] == [5, 6, 10, 11, 20]
    assert labels.current == 20


@pytest.mark.parametrize("bad", [3, 2, -1, 3.0, 4.0, "7", True, object()])
def test_a_bad_label_is_told_and_replaced_by_the_next_free_one(bad: object) -> None:
    labels = StepLabels(0)
    labels.next(3)
    label, wrong = labels.next(bad)
    assert label == 4
    assert wrong is not None
    assert labels.next(None) == (5, None)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (10**5000, "step=int "),
        (torch.empty(2, 3, device="meta"), "step=Tensor of shape (2, 3) "),
        (np.float64(1.5), "1.5"),
        ("x" * 10_000, "(str) "),
        (Unspeakable(), "Unspeakable"),
    ],
    ids=["digits", "tensor", "numpy", "text", "no text"],
)
def test_a_label_that_is_none_is_told_in_a_few_words(given: object, said: str) -> None:
    labels = StepLabels(7)
    label, wrong = labels.next(given)
    assert label == 7
    assert wrong is not None
    assert said in wrong
    assert len(wrong) < 200
    assert labels.next() == (8, None)
