"""The figures: functions from the record of a run to Plotly figures. For a notebook, the pages, and the trackers.

Every one takes `dark` (the theme) and `width_pixels`, how wide the figure will be: of long curves it keeps, for each
pixel, the lowest and the highest value, so that no spike is lost; see `statsbridge.view.downsample`. NaN, infinities
and what a logarithmic axis has no place for are marked; what was not measured is a gap. Numbers are rounded to 7
significant digits. The names of modules, runs and scalars are shown as text, never as markup.

Each raises ConfigError that names the choices for what was not recorded, and where Plotly is not installed.
"""

from .figures_depth import depth_profile, update_ratio
from .figures_flow import gradient_flow, types
from .figures_grid import grid, heat_map
from .figures_histograms import histograms
from .figures_scalars import learning_curves, overlay, scalars, training
from .figures_series import module_series

__all__ = [
    "depth_profile",
    "gradient_flow",
    "grid",
    "heat_map",
    "histograms",
    "learning_curves",
    "module_series",
    "overlay",
    "scalars",
    "training",
    "types",
    "update_ratio",
]
