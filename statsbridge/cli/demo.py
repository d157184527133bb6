"""`statsbridge demo`: train a small network with one part broken on purpose, and see it in the table."""

import importlib.util
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import statsbridge
from statsbridge.errors import ConfigError

from .output import command, number, page, print_line, progress_bar, show_page
from .show import print_run

if TYPE_CHECKING:
    import torch
    from rich.progress import ProgressColumn
    from torch import nn

SEED = 0
DEAD_BLOCK = 1
BATCH = 64
TRAINING_SHARE = 0.8
LEARNING_RATE = 5e-3
QUERY = "SELECT module, max(zero_fraction) FROM stats WHERE site = 'activation' GROUP BY module"


def demo(
    *,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = "statsbridge-runs",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1,437 training images.")] = 15,
) -> None:
    """Train a small residual network on scikit-learn's digits and show what statsbridge saw of it.

    One ReLU is dead from the start. The loss does not tell, the table does.
    """
    with command():
        _check_surroundings()
        path, dead = train(directory, epochs)
        explain(path, dead)


def _check_surroundings() -> None:
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}, not installed here: pip install 'statsbridge[demo]'"
        )
    if os.environ.get("STATSBRIDGE_DISABLED") == "1":
        raise ConfigError("$STATSBRIDGE_DISABLED=1 lets nothing be recorded: unset it for the demo")


def train(directory: str, epochs: int) -> tuple[Path, str]:
    """Train and record a run; returns its folder and the path of the module that is dead."""
    with _one_thread():
        return _train(directory, epochs)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread: tensors as small as these take several threads many times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(directory: str, epochs: int) -> tuple[Path, str]:
    import torch
    from torch.nn import functional

    from .demo_model import ResidualNetwork, kill

    torch.manual_seed(SEED)
    (images, targets), validation = _digits()
    model = ResidualNetwork()
    dead = kill(model, DEAD_BLOCK)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    config = {"seed": SEED, "batch": BATCH, "lr": LEARNING_RATE, "dead": dead}

    recording = statsbridge.init(model, every=10, name="demo", config=config, dir=directory)
    with recording as run, progress_bar(*_columns()) as progress:
        batches = -(-len(images) // BATCH)
        task = progress.add_task("training", total=epochs * batches, loss="", accuracy="")
        for epoch in range(epochs):
            shuffled = torch.randperm(len(images))
            for start in range(0, len(images), BATCH):
                batch = shuffled[start : start + BATCH]
                loss = functional.cross_entropy(model(images[batch]), targets[batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                run.step(loss=loss)
                progress.advance(task)
            measured = _evaluate(model, *validation)
            run.log(measured, epoch=epoch)
            loss_text, accuracy_text = f"{measured['val/loss']:.3f}", f"{measured['val/accuracy']:.3f}"
            progress.update(task, loss=loss_text, accuracy=accuracy_text)
            if progress.disable:
                line = f"epoch {epoch + 1}/{epochs}  validation loss {loss_text}  accuracy {accuracy_text}"
                typer.echo(line, err=True)
    assert run.path is not None  # only a disabled run has none
    return run.path, dead


def _columns() -> "tuple[ProgressColumn, ...]":
    """Of the bar. Where that is disabled, `train` prints lines instead."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    text = TextColumn("loss {task.fields[loss]} accuracy {task.fields[accuracy]}")
    return TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), text


def _digits() -> "tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]":
    """Training and validation (images [N, 1, 8, 8] in 0…1, targets [N]), shuffled by the seed."""
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.images))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    targets = torch.tensor(digits.target)[order]
    border = int(TRAINING_SHARE * len(images))
    return (images[:border], targets[:border]), (images[border:], targets[border:])


def _evaluate(model: "nn.Module", images: "torch.Tensor", targets: "torch.Tensor") -> dict[str, float]:
    import torch
    from torch.nn import functional

    model.eval()
    with torch.no_grad():
        logits = model(images)
    model.train()
    loss = functional.cross_entropy(logits, targets)
    accuracy = (logits.argmax(1) == targets).double().mean()
    return {"val/loss": float(loss), "val/accuracy": float(accuracy)}


def explain(path: Path, dead: str) -> None:
    """Print the table of the run, what is wrong in it, and what to try next."""
    from statsbridge.analyze.overview import overview
    from statsbridge.log import load

    from .facts import first_and_last

    data = load(path)
    result = overview(data.merged())
    print_run(data, result, changes=False)
    accuracy = first_and_last(data, "val/accuracy")
    zeros = next(row.values["zero_fraction"] for row in result.rows if row.module == dead)
    block = dead.rpartition(".")[0]
    where = shlex.quote(str(path))
    lines = [
        "",
        f"{dead} was broken on purpose: the bias of {block}.norm1 starts so low that no unit ever fires.",
        f"Loss and accuracy ({number(accuracy and accuracy[1])}) do not tell: the skip goes round it.",
        f"The row of {dead} shows it: !! dead, its zero_fraction is {number(zeros)}.",
        f"The run is in {path}. Try next:",
        f"  statsbridge diagnose {where}",
        f"  statsbridge show {where} --site parameter_grad --modules '{block}.*'",
        f"  statsbridge view {where}      # needs: pip install 'statsbridge[view]'",
        f"  statsbridge report {where}    # the same",
        "in Python, with or without torch:",
        f"  data = statsbridge.load({str(path)!r})",
        f"  data.series({dead!r}, 'activation', 'zero_fraction')",
    ]
    if importlib.util.find_spec("duckdb") is not None:
        lines.append(f'  data.query("{QUERY}")')
    console = page()
    for line in lines:
        print_line(console, line)
    show_page(console)
