"""The commands: the only place that knows typer and rich."""

from typing import Annotated

import typer

import statsbridge

from .care import check, compact
from .compare import compare
from .curves import curves
from .demo import demo
from .diagnose import diagnose
from .doctor import doctor
from .ls import ls
from .output import NO_EDGE
from .plain import Command, Group
from .policy import policy
from .preflight import preflight
from .query import query
from .report import report
from .sample import sample
from .show import show
from .sync import sync
from .verify import verify
from .view import view
from .watch import watch

app = typer.Typer(
    name="statsbridge",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"terminal_width": NO_EDGE},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"statsbridge {statsbridge.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Say the version.")
    ] = False,
) -> None:
    """Statistics of every module of a PyTorch model during training, from Parquet on your own disk."""


for body in (
    ls,
    show,
    query,
    curves,
    compare,
    diagnose,
    watch,
    report,
    sample,
    sync,
    verify,
    view,
    policy,
    check,
    compact,
    preflight,
    doctor,
    demo,
):
    app.command(cls=Command)(body)
