"""A Plotly figure as a page on disk."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go


def write_figure(folder: Path, name: str, figure: go.Figure) -> Path:
    """Write `<name>.html`, in the place of the last of that name, and once Plotly's script, which all of them share.

    Characters that do not belong into a file's name become `_`, and a hash of the name follows. The page needs no
    network. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)[:80]
    if plain != name:
        plain += "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    path = folder / f"{plain}.html"
    unfinished = path.with_name(path.name + ".tmp")
    figure.write_html(unfinished, include_plotlyjs="directory")
    os.replace(unfinished, path)
    return path
