"""What `statsbridge show` says of a run, as JSON and as CSV."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ls import size
from .output import as_csv

if TYPE_CHECKING:
    from statsbridge.analyze.overview import Overview, Row
    from statsbridge.log import RunData
    from statsbridge.log.size import Growth


def first_and_last(data: "RunData", name: str) -> tuple[float, float] | None:
    """The first and the last value of one scalar, in the order of the steps; None where it has none."""
    import pyarrow.compute as pc

    rows = data.scalars.filter(pc.equal(data.scalars["name"].cast("string"), name))
    # Each rank may log its own loss; a mixture of them would be nobody's.
    rows = rows.filter(pc.equal(rows["rank"], pc.min(rows["rank"]))).sort_by("step")
    values = rows["value"].drop_null()
    return (values[0].as_py(), values[-1].as_py()) if len(values) else None


def size_line(grown: "Growth") -> str:
    """What a run takes on disk, and what a day of it would."""
    a_day = grown.bytes_a_day
    rate = "" if a_day is None else f", {size(round(a_day))} a day of this training"
    return f"{size(grown.bytes)} on disk{rate}"


def alerts(data: "RunData") -> list[dict[str, Any]]:
    """The events of severity warning and critical, in the order in which they were written."""
    events: list[dict[str, Any]] = data.events.to_pylist()
    return [event for event in events if event["severity"] in {"warning", "critical"}]


def document(data: "RunData", result: "Overview") -> dict[str, Any]:
    """The run, the rows of `result` with their trends and marks, and the alerts, for JSON."""
    from statsbridge.log.runs import run_state
    from statsbridge.log.size import growth

    loss, grown = first_and_last(data, "loss"), growth(data)
    ratio = result.gradient_ratio
    return {
        "run": {
            "id": data.id,
            "name": data.info["name"],
            "path": str(Path(data.path)),
            "state": run_state(data.path),
            "attempts": [
                {"attempt": one.number, "first_step": one.first_step, "started": one.started} for one in data.attempts
            ],
        },
        "size": {"bytes": grown.bytes, "bytes_a_day": grown.bytes_a_day},
        "site": result.site,
        "step": result.step,
        "steps": result.steps,
        "loss": None if loss is None else {"first": loss[0], "last": loss[1]},
        "gradient_ratio": None if ratio is None else {"first": ratio.first, "last": ratio.last, "value": ratio.value},
        "rows": [_row_document(row) for row in result.rows],
        "events": [
            {key: event[key] for key in ("step", "kind", "severity", "module", "site", "tensor", "value", "message")}
            for event in alerts(data)
        ],
    }


def _row_document(row: "Row") -> dict[str, Any]:
    return {
        **_identity(row),
        "values": row.values,
        "trends": {
            name: {
                "first": trend.first,
                "last": trend.last,
                "change": trend.change,
                "values": trend.values,
            }
            for name, trend in row.trends.items()
        },
        "marks": [
            {
                "name": mark.rule.name,
                "severity": mark.rule.severity,
                "statistic": mark.rule.statistic,
                "value": mark.value,
                "threshold": mark.rule.threshold,
            }
            for mark in row.marks
        ],
    }


def _identity(row: "Row") -> Mapping[str, Any]:
    names = ("depth", "order", "module", "type", "call", "tensor", "status")
    return {name: getattr(row, name) for name in names}


def csv_text(result: "Overview", *, trends: bool) -> str:
    """The rows of `result`; with `trends` also the first and last value of each trend and its change."""
    header = ["step", "depth", "order", "module", "type", "call", "tensor", "status", "marks"]
    header += result.statistics
    if trends:
        header += [f"{name}_{part}" for name in result.trends for part in ("first", "last", "change")]
    rows: list[Sequence[Any]] = []
    for row in result.rows:
        marks = ",".join(mark.rule.name for mark in row.marks)
        cells = [result.step, *_identity(row).values(), marks, *row.values.values()]
        if trends:
            cells += [part for trend in row.trends.values() for part in (trend.first, trend.last, trend.change)]
        rows.append(cells)
    return as_csv(header, rows)
