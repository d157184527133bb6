"""The commands: the only place that knows typer and rich."""

from typing import Annotated

import typer

import statsbridge

from .care import check, compact
from .demo import demo
from .doctor import doctor
from .ls import ls
from .policy import policy
from .show import show
from .sync import sync
from .verify import verify

app = typer.Typer(name="statsbridge", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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


app.command()(ls)
app.command()(show)
app.command()(sync)
app.command()(verify)
app.command()(policy)
app.command()(check)
app.command()(compact)
app.command()(doctor)
app.command()(demo)
