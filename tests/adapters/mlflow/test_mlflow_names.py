"""Names: what MLflow's own check accepts, and never two of ours to one of MLflow's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsbridge_mlflow import names

from statsbridge.testing import HARD_NAMES

ODD = st.text(st.sampled_from("ab/._- :?é\n~"), max_size=12)


def accepted(name: str) -> bool:
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import _validate_metric_name

    try:
        _validate_metric_name(name)
    except MlflowException:
        return False
    return len(name) <= 250


@given(st.one_of(ODD, st.text(max_size=300)))
def test_every_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    assert accepted(names.key(name))


@given(ODD, ODD)
def test_different_names_stay_different(one: str, other: str) -> None:
    for made in (names.plain, names.key):
        assert (made(one) == made(other)) == (one == other)


@pytest.mark.parametrize("name", ["loss", "activation/std/blocks.0.conv-1", "lr/Adam/0", "größe", "x" * 238, "a b"])
def test_what_mlflow_accepts_is_not_renamed(name: str) -> None:
    assert names.key(name) == f"statsbridge/{name}"


@pytest.mark.parametrize("name", ["a:b", "a//b", "/a", "a/", "a/./b", "..", "a?", "a ", "", "x" * 239])
def test_what_it_does_not_accept_is(name: str) -> None:
    assert names.key(name) != f"statsbridge/{name}"


@given(ODD)
def test_a_name_like_a_renamed_one_is_not_taken_for_it(name: str) -> None:
    renamed = names.plain(name)
    assert (names.plain(renamed) == renamed) == (renamed == name)


def test_hard_names() -> None:
    made = {names.key(name) for name in HARD_NAMES}
    assert len(made) == len(set(HARD_NAMES))
    assert all(accepted(name) for name in made)


def test_a_configuration_becomes_flat_text() -> None:
    config = {
        "lr": 0.001,
        "model": {"width": 64, "norm": None, "empty": {}},
        "layers": [1, {"a": "ü"}],
        "note": "x" * 9000,
    }
    assert names.parameters(config) == {
        "statsbridge/lr": "0.001",
        "statsbridge/model.width": "64",
        "statsbridge/model.norm": "None",
        "statsbridge/model.empty": "{}",
        "statsbridge/layers": '[1, {"a": "ü"}]',
        "statsbridge/note": "x" * 6000,
    }


def test_a_dot_in_a_key_is_not_taken_for_nesting() -> None:
    made = names.parameters({"a": {"b": 1}, "a.b": 2})
    assert sorted(made.values()) == ["1", "2"]
    assert all(accepted(name) for name in made)
