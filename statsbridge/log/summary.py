"""What a run is, at a glance."""

from collections import Counter
from typing import TYPE_CHECKING

import pyarrow as pa

from .schema import SCHEMAS, SITES

if TYPE_CHECKING:
    from .reader import RunData


def summary(run: "RunData", stats: pa.Table) -> dict[str, str]:
    """What there is to say of a run in a few words, each with its name. `stats`: all rows, with the column `step`."""
    severities = Counter(run.events["severity"].to_pylist())
    sites = run._sites()
    rows = {name: stats if name == "stats" else getattr(run, name) for name in SCHEMAS}
    return {
        "run": f"{run.id} ({run.info['name']})",
        "sampled steps": str(len(stats["step"].unique())),
        "modules": str(len(run.modules["module"].unique())),
        "sites": ", ".join(site for site in SITES if site in sites) or "none",
        "rows": ", ".join(f"{name} {table.num_rows}" for name, table in rows.items()),
        "events": ", ".join(f"{count} {severity}" for severity, count in severities.items()) or "none",
        "path": str(run.path),
    }
