"""Names are text in every figure, never markup: in its JSON, and in a real browser. And they can be read."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
import pytest
from browser_helpers import record_traffic
from figure_helpers import rows, texts
from hypothesis import given
from hypothesis import strategies as st
from log_rows import new_run, scalar_rows, write_run

from statsbridge.analyze.curves import curves
from statsbridge.analyze.run_data import RunData, load
from statsbridge.view import figures
from statsbridge.view.style import DARK, LIGHT, escape, line_style, shortened, thin

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVIL = "<img src=x onerror=alert(1)>"
BOLD = "<b>%{x}</b>$x^2$&amp;"
OURS = re.compile(r"<br>|</?su[bp]>|<extra></extra>")


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Everything that somebody else may have named is markup."""
    run = new_run(tmp_path_factory.mktemp("evil"), EVIL)
    names = [(EVIL, BOLD, 1, 0), (BOLD, EVIL, 2, 1), (f"{EVIL}.{'long.' * 30}{BOLD}", "<i>T</i>", 3, 2)]
    works = []
    for step in (0, 10):
        for site in ("activation", "activation_grad", "parameter", "parameter_grad", "update"):
            works.append({"stats": rows(site, step, tuple(names)) | {"tensor": "<u>t</u>", "nan_count": 1}})
        works.append(
            {"scalars": scalar_rows(step, **{f"loss{EVIL}": 1.0, f"lr/{BOLD}": 0.1, f"{BOLD}/x": float(step)})}
        )
    event = {
        "step": 10,
        "time": 1.7e9,
        "kind": EVIL,
        "severity": "warning",
        "module": EVIL,
        "message": f"{BOLD} {EVIL}",
    }
    write_run(run, *works, {"events": {name: [value] for name, value in event.items()}})
    return load(run)


def all_figures(data: RunData) -> dict[str, go.Figure]:
    return {
        "heat map": figures.heat_map(data, "activation", "std"),
        "depth profile": figures.depth_profile(data),
        "module": figures.module_series(data, EVIL),
        "types": figures.types(data, "activation", "std"),
        "grid": figures.grid(data, "parameter", "l2"),
        "gradient flow": figures.gradient_flow(data),
        "gradient flow by type": figures.gradient_flow(data, by="type"),
        "update ratio": figures.update_ratio(data),
        "histograms": figures.histograms(data, EVIL, "parameter_grad"),
        "ridges": figures.histograms(data, EVIL, "parameter_grad", kind="ridge"),
        "scalars": figures.scalars(data),
        "training": figures.training(data),
        "overlay": figures.overlay([data, data], f"loss{EVIL}"),
        "learning curves": figures.learning_curves(curves(data, train=f"loss{EVIL}", validation=f"lr/{BOLD}")),
        "missing site": figures.depth_profile(data, backward=(EVIL, "std")),
    }


def test_no_text_of_a_figure_has_markup_but_ours(evil: RunData) -> None:
    for name, figure in all_figures(evil).items():
        found = texts(figure.to_dict())
        assert any("&lt;" in text for text in found), name
        for text in found:
            assert "<" not in OURS.sub("", text), f"{name}: {text}"
            assert "$" not in text, f"{name}: {text}"
            assert "%{x}</" not in text.replace("&lt;", "<"), f"{name}: {text}"


def test_in_a_browser_names_are_shown_as_they_are(evil: RunData, page: Page, tmp_path: Path) -> None:
    drawn = all_figures(evil)
    plots = [
        figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(drawn.values())
    ]
    file = tmp_path / "figures.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{''.join(plots)}", "utf-8")
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    traffic = record_traffic(page)
    page.goto(file.as_uri())
    page.wait_for_function(f"document.querySelectorAll('.main-svg .infolayer').length >= {len(drawn)}")
    assert page.locator("img").count() == 0
    assert page.locator("svg [font-weight='bold'], svg b, svg u").count() == 0
    shown = page.evaluate("[...document.querySelectorAll('svg text')].map(text => text.textContent)")
    assert f"1 · {EVIL}.<u>t</u>" in shown  # a tick of the heat map
    assert any(EVIL in text and "Scalars of" in text for text in shown)
    assert any(BOLD in text for text in shown)
    assert not dialogs
    traffic.assert_only(file.as_uri())


def test_long_names_lose_their_middle_and_stay_whole_in_the_hover_text(evil: RunData) -> None:
    figure = figures.depth_profile(evil)
    assert sum("…" in text for text in figure.layout.xaxis2.ticktext) == 1
    whole = max((about[0] for about in figure.data[1].customdata), key=len)
    assert escape("long." * 30) in whole


@given(st.text(max_size=200), st.integers(5, 60))
def test_shortened_texts_keep_both_ends(text: str, longest: int) -> None:
    short = shortened(text, longest)
    assert len(short) <= longest
    assert short == text or (text.startswith(short.split("…")[0]) and len(text) > longest)


@given(st.lists(st.floats(allow_infinity=False), max_size=30))
def test_thin_numbers_are_right_to_seven_digits(values: list[float]) -> None:
    for exact, shown in zip(values, thin(values), strict=True):
        if math.isnan(exact):
            assert shown is None
        else:
            assert shown is not None
            assert abs(shown - exact) <= 5.1e-7 * abs(exact)
            if 1e-15 < abs(exact) < 1e15:
                assert shown == float(f"{shown:.7g}")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_lines_stand_out_from_the_paper(theme: object) -> None:
    assert contrast(theme.text, theme.paper) > 7
    assert min(contrast(colour, theme.paper) for colour in theme.severity.values()) > 4
    assert min(contrast(colour, theme.paper) for colour in theme.lines) > 2


# Machado, Oliveira and Fernandes 2009: what is left of linear RGB without red-, and without green-sensitive cones.
PROTANOPIA = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)


def lab(colour: str, eye: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as that eye sees it."""
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    seen = np.clip(eye @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (
        one ** (1 / 3) if one > (6 / 29) ** 3 else one / (3 * (6 / 29) ** 2) + 4 / 29
        for one in to_xyz @ seen / (0.9505, 1.0, 1.089)
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", [np.eye(3), PROTANOPIA, DEUTERANOPIA], ids=["usual", "protanopia", "deuteranopia"])
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_any_two_colours_of_lines_differ_to_every_eye(theme: object, eye: np.ndarray) -> None:
    seen = [lab(colour, eye) for colour in theme.lines]
    # A difference of 2.3 can just be seen side by side.
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 9


def test_thirty_two_lines_differ() -> None:
    assert len({tuple(line_style(number, False).items()) for number in range(32)}) == 32
