"""What a Selection accepts, and how it goes to disk and back."""

import json
import math
from typing import Any

import pytest

from statsbridge import ConfigError
from statsbridge.log import SITES
from statsbridge.mirror import Selection
from statsbridge.mirror.selection import ALL_STATISTICS, USUAL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_series": 0}, "max_series=0: give a whole number"),
        ({"max_series": True}, "max_series=True"),
        ({"max_series": 2.5}, "max_series=2.5"),
        ({"sites": "activations"}, "did you mean activation\\?"),
        ({"sites": []}, "sites=\\[\\]: give a name, a glob pattern"),
        ({"modules": 3}, "modules=3: give a name, a glob pattern"),
        ({"modules": ["ok", 3]}, "modules="),
        ({"statistics": "stdd"}, "did you mean std\\?"),
        ({"smoothing": 1.0}, "smoothing=1.0: give a weight between 0 and 1"),
        ({"smoothing": math.nan}, "smoothing=nan"),
        ({"aggregates": 1}, "aggregates=1: give True or False"),
        ({"artifact": "yes"}, "artifact='yes': give True or False"),
        ({"figure_growth": 1}, "figure_growth=1: give a number above 1"),
        ({"figure_growth": math.inf}, "figure_growth=inf"),
        ({"alerts": "error"}, "unknown severity error"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_right_ones(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Selection(**arguments)


def test_it_survives_json() -> None:
    selection = Selection(
        max_series=7,
        modules=["blocks.*", "head"],
        sites="activation*",
        statistics=("std", "l2"),
        smoothing=None,
        alerts=None,
    )
    again = Selection.from_json(json.loads(json.dumps(selection.to_json())))
    assert again == selection
    assert Selection.from_json(Selection().to_json()) == Selection()


def test_an_unknown_argument_on_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean max_series"):
        Selection.from_json({"max_serie": 3})


def test_every_site_has_a_first_statistic_before_any_has_a_second() -> None:
    assert {site for site, _ in USUAL} == set(SITES)
    assert {statistic for _, statistic in USUAL} <= set(ALL_STATISTICS)
    of_modules = [site for site, statistic in USUAL if not site.startswith("tensor") and statistic != "histogram"]
    first = list(dict.fromkeys(of_modules))
    assert of_modules[: len(first)] == first


def test_globs_choose_statistics_and_sites() -> None:
    chosen = Selection(statistics=["*mean", "update_ratio"], sites=["activation", "update"])
    assert set(chosen.ranks("activation")) == {"mean", "abs_mean"}
    assert set(chosen.ranks("update")) == {"mean", "abs_mean", "update_ratio"}
    assert chosen.ranks("parameter") == {}
    assert "histogram" not in Selection(histograms=False, statistics="*").ranks("activation")
    assert "histogram" in Selection(statistics="*").ranks("activation")


def test_alerts_from_a_severity_on() -> None:
    assert [Selection().alerting(severity) for severity in ("info", "warning", "critical")] == [False, True, True]
    assert not Selection(alerts=None).alerting("critical")
    assert Selection(alerts="info").alerting("info")
