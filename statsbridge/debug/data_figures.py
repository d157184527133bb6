"""Pictures: five samples, the spread of features, the sizes of classes, the dead units of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..view.figures_debug import title_of_test
from ..view.style import colours, empty_figure, escape, label, new_figure, plotly_graphs, thin
from .data_features import feature_axis, is_image

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from .data import DataResult
    from .data_labels import Labels
    from .data_split import Sample, Split
    from .dead_units import DeadUnits

Array = npt.NDArray[Any]

_SAMPLES = 5
_MOST_FEATURES = 2000
_MOST_CLASSES = 200
_LONGEST_SIDE = 128  # pixels of a picture that are drawn; more are left out evenly
_GREYS = [[0, "#000000"], [1, "#ffffff"]]


def data_figure(result: DataResult, *, dark: bool = False) -> go.Figure:
    """Five samples with their labels, below them the features' mean and spread, and how many samples each class has.

    Raises ConfigError where Plotly is not installed.
    """
    training = result.splits["training"]
    title = title_of_test(result.name, result.passed)
    if not training.shown:
        return empty_figure(title, "there is no sample to show", dark=dark)
    plotly_graphs()
    from plotly.subplots import make_subplots

    titles = [_sample_title(sample) for sample in training.shown]
    titles += [""] * (_SAMPLES - len(titles))
    figure = make_subplots(
        rows=2,
        cols=_SAMPLES,
        specs=[[{}] * _SAMPLES, [{"colspan": 3}, None, None, {"colspan": 2}, None]],
        row_heights=[0.42, 0.58],
        vertical_spacing=0.16,
        horizontal_spacing=0.05,
        subplot_titles=[*titles, "mean of each feature, ± its standard deviation", _class_title(training)],
    )
    outer = new_figure(title, dark=dark, height=560)
    figure.update_layout(template=outer.layout.template, title=outer.layout.title, height=560, showlegend=False)
    figure.update_annotations(font={"size": 13})
    for column, sample in enumerate(training.shown, start=1):
        _draw_sample(figure, sample, column, dark)
    for column in range(len(training.shown) + 1, _SAMPLES + 1):
        figure.update_xaxes(visible=False, row=1, col=column)
        figure.update_yaxes(visible=False, row=1, col=column)
    _draw_features(figure, result, dark)
    _draw_classes(figure, training.class_labels(), dark)
    return figure


def _class_title(training: Split) -> str:
    labels = training.class_labels()
    return "samples of each class" if labels is not None and labels.are_classes else "the target is no class"


def _sample_title(sample: Sample) -> str:
    target = next(iter(sample.targets.values()), None)
    if target is None or target.size != 1:
        return f"sample {sample.index}"
    value = target.item()
    return f"sample {sample.index}: {f'{value:.4g}' if isinstance(value, float) else label(value, 16)}"


def _draw_sample(figure: go.Figure, sample: Sample, column: int, dark: bool) -> None:
    array = next((one for one in sample.inputs.values() if one.dtype.kind in "biuf" and one.size), None)
    place = {"row": 1, "col": column}
    if array is None:
        return
    if not is_image(array.shape):
        values = np.where(np.isfinite(array), array, np.nan).reshape(-1)[:_MOST_FEATURES].astype(np.float64)
        line = {"color": colours(dark).lines[0]}
        figure.add_scatter(
            y=thin(values), mode="lines", line=line, hovertemplate="%{x}: %{y:.4g}<extra></extra>", **place
        )
        return
    pixels = array if array.ndim == 2 else np.moveaxis(array, feature_axis((1, *array.shape)) - 1, -1)
    step = -(-max(pixels.shape[:2]) // _LONGEST_SIDE)
    pixels = pixels[::step, ::step].astype(np.float64)
    if pixels.ndim == 3 and pixels.shape[-1] >= 3:
        figure.add_image(z=_bytes(pixels[..., :3]).tolist(), hoverinfo="skip", **place)
    else:
        grey = np.where(np.isfinite(pixels), pixels, np.nan).reshape(*pixels.shape[:2], -1)[..., 0]
        rows = [thin(row) for row in grey]
        hover = "%{z:.4g}<extra></extra>"
        figure.add_heatmap(z=rows, colorscale=_GREYS, showscale=False, hovertemplate=hover, **place)
    axis = f"x{column if column > 1 else ''}"
    figure.update_yaxes(autorange="reversed", scaleanchor=axis, visible=False, **place)
    figure.update_xaxes(visible=False, constrain="domain", **place)


def _bytes(pixels: Array) -> Array:
    """Colours stretched over 0 to 255, since nobody can see normalised ones."""
    finite = pixels[np.isfinite(pixels)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    scaled = (np.nan_to_num(pixels, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
    return np.round(255 * scaled).astype(np.uint8)


def _draw_features(figure: go.Figure, result: DataResult, dark: bool) -> None:
    place = {"row": 2, "col": 1}
    for number, feature in enumerate(result.splits["training"].inputs.values()):
        moments = feature.moments
        if moments is None:
            continue
        chosen = np.unique(np.linspace(0, len(moments.count) - 1, _MOST_FEATURES).astype(int))
        chosen = chosen[moments.count[chosen] > 0]
        figure.add_scatter(
            x=chosen.tolist(),
            y=thin(moments.mean[chosen]),
            error_y={"type": "data", "array": thin(moments.std[chosen]), "thickness": 1, "width": 0},
            mode="markers",
            marker={"size": 5, "color": colours(dark).lines[number % 8]},
            name=escape(feature.path or "input"),
            hovertemplate=f"{feature.word} %{{x}}<br>mean %{{y:.4g}} ± %{{error_y.array:.4g}}<extra></extra>",
            **place,
        )
    inputs = result.splits["training"].inputs.values()
    widest = max((len(one.moments.count) for one in inputs if one.moments is not None), default=0)
    figure.update_xaxes(title="feature or channel", dtick=1 if widest <= 20 else None, **place)
    figure.update_yaxes(title="unit of the input", **place)


def _draw_classes(figure: go.Figure, labels: Labels | None, dark: bool) -> None:
    place = {"row": 2, "col": 4}
    if labels is None or not labels.are_classes:
        figure.update_xaxes(visible=False, **place)
        figure.update_yaxes(visible=False, **place)
        return
    figure.update_xaxes(title="class", type="category", **place)
    figure.update_yaxes(title="samples", rangemode="tozero", **place)
    ordered = sorted(labels.counts.items(), key=lambda pair: (isinstance(pair[0], str), pair[0]))[:_MOST_CLASSES]
    figure.add_bar(
        x=[label(name, 20) for name, _ in ordered],
        y=[count for _, count in ordered],
        marker={"color": colours(dark).lines[2]},
        hovertemplate="class %{x}<br>%{y} samples<extra></extra>",
        **place,
    )


def dead_units_figure(result: DeadUnits, *, dark: bool = False) -> go.Figure:
    """The share of units that never fired, by layer in the order of the data flow, with the share allowed.

    Raises ConfigError where Plotly is not installed.
    """
    title = title_of_test(result.name, result.passed)
    if not result.layers:
        return empty_figure(title, "no layer with a ReLU was seen", dark=dark)
    theme = colours(dark)
    figure = new_figure(title, dark=dark, height=min(1600, 170 + 26 * len(result.layers)))
    allowed = float(result.numbers["allowed"] or 0)
    shares = [layer.fraction for layer in result.layers]
    figure.add_bar(
        x=shares,
        y=list(range(len(shares))),
        orientation="h",
        marker={"color": [theme.severity["critical"] if share > allowed else theme.lines[0] for share in shares]},
        text=[f"{len(layer.dead)} of {layer.units}" for layer in result.layers],
        hovertext=[escape(layer.title) for layer in result.layers],
        hovertemplate="%{hovertext}<br>%{text} units dead<extra></extra>",
    )
    figure.add_vline(x=allowed, line={"color": theme.severity["info"], "dash": "dash"})
    figure.update_xaxes(title="share of units that never fired", range=[0, 1.05], tickformat=".0%")
    figure.update_yaxes(
        autorange="reversed",
        tickmode="array",
        tickvals=list(range(len(shares))),
        ticktext=[label(layer.title) for layer in result.layers],
    )
    return figure
