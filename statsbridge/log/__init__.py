"""Numbers → Parquet parts on the user's own disk, and back. The source of truth."""

from .folder import create_run
from .reader import RunData, load
from .runs import RunSummary, list_runs, resolve_run
from .schema import SCHEMA_VERSION, SCHEMAS, SITES
from .writer import Writer

__all__ = [
    "SCHEMAS",
    "SCHEMA_VERSION",
    "SITES",
    "RunData",
    "RunSummary",
    "Writer",
    "create_run",
    "list_runs",
    "load",
    "resolve_run",
]
