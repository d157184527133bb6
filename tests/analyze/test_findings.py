"""A finding as JSON."""

import json
import math

import pytest

from statsbridge.analyze.findings import Finding


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, None),
        (0.1 + 0.2, 0.30000000000000004),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (math.nan, "NaN"),
    ],
)
def test_json_that_any_parser_reads(value: float | None, written: object) -> None:
    finding = Finding(kind="loss_spike", severity="warning", step=3, message="<b>", value=value, causes=("a", "b"))
    text = json.dumps(finding.to_json(), allow_nan=False)
    again = json.loads(text)
    assert again["value"] == written
    assert again["causes"] == ["a", "b"]
    assert set(again) == set(Finding.__dataclass_fields__)
