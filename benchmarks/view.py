"""The live page on a large run: time to the first picture and from a click to its picture, in Chromium, and memory.

Makes a run of 1,000 modules × 10,000 sampled steps (two sites: 20 million rows, minutes) unless it is given one. Each
click goes to a module that was not looked at before; each tab is opened twice, as what a run was asked once is kept.

    python benchmarks/view.py [--run PATH] [--modules 1000] [--steps 10000] [--clicks 7]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from statsbridge.log import SCHEMAS, Writer, create_run, load
from statsbridge.log.compaction import compact_table

if TYPE_CHECKING:
    from playwright.sync_api import Page

CONSOLE = Console(width=110)
# A run without gradients has a tab or two that say so.
SHOWN = "#content .js-plotly-plot .main-svg, #content .mantine-Alert-root"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
TABS = ("Heat map", "Depth", "Types", "Grid", "Gradient flow", "Updates", "Scalars")
SITES = ("activation", "activation_grad")
TOGETHER = 50  # sampled steps in a part
NUMBERS = ("mean", "std", "min", "max", "abs_mean", "l2", "zero_fraction", "skewness", "kurtosis", "kl_unit_gaussian")
# The page says which place its contents are of.
THERE = """() => {
    const wanted = new URLSearchParams(location.search);
    ['find', 'order', 'theme'].forEach(name => wanted.delete(name));
    const shown = (document.querySelector('#content') || {dataset: {}}).dataset.place;
    return shown !== undefined && shown.replace(/^[?]/, '') === wanted.toString();
}"""


def make_run(folder: Path, modules: int, steps: int) -> Path:
    """A run as a long training leaves it: merged parts, and small ones of its last steps."""
    run = create_run(folder, name="large", config=None, information={"sites": SITES})
    writer = Writer(run)
    names = [f"blocks.{number // 10}.layers.{number % 10}" for number in range(modules)]
    writer.submit(
        lambda: {
            "modules": {"module": names, "type": "Linear", "parent": [name.rpartition(".")[0] for name in names],
                        "call": 0, "order": np.arange(modules), "depth": np.arange(modules), "leaf": True,
                        "parameters": 4160, "order_source": "runtime", "step": 0}
        }
    )  # fmt: skip
    rows = modules * len(SITES)
    for first in range(0, steps, TOGETHER):
        at = np.arange(first, min(first + TOGETHER, steps))
        noise = np.random.default_rng(first).normal(size=(len(NUMBERS), len(at) * rows))
        columns: dict[str, Any] = {
            "step": np.repeat(at, rows),
            "iteration": np.repeat(at, rows),
            "time": np.repeat(1.7e9 + at, rows),
            "module": np.tile(np.repeat(names, len(SITES)), len(at)),
            "type": "Linear",
            "call": 0,
            "order": np.tile(np.repeat(np.arange(modules), len(SITES)), len(at)),
            "depth": np.tile(np.repeat(np.arange(modules), len(SITES)), len(at)),
            "site": np.tile(SITES, len(at) * modules),
            "tensor": "",
            "count": 4096,
            "nan_count": 0,
            "inf_count": 0,
            **{name: np.abs(1 + row * 0.01) for name, row in zip(NUMBERS, noise, strict=True)},
        }
        loss = {"step": at, "iteration": at, "time": 1.7e9 + at, "name": "loss", "value": np.exp(-at / steps)}
        assert writer.submit(lambda columns=columns, loss=loss: {"stats": columns, "scalars": loss})  # type: ignore[misc]
        assert writer.flush()
    assert writer.close()
    for table in SCHEMAS:
        compact_table(run, table, 0)
    return run


def memory_of(process: subprocess.Popen[str]) -> float:
    """The most that a process has held, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def waited(page: Page, act: Any, *, leads_away: bool = True) -> float:
    """Seconds from `act` until the page shows where it led to, drawn. `leads_away`: to another address."""
    before = page.evaluate("() => location.search") if leads_away else None
    begin = time.perf_counter()
    act()
    page.wait_for_function("before => location.search !== before", arg=before)
    page.wait_for_function(THERE, timeout=120_000)
    page.wait_for_selector(SHOWN, timeout=120_000)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.perf_counter() - begin


def measure(run: Path, clicks: int) -> Table:
    from playwright.sync_api import sync_playwright

    program = [sys.executable, "-c", "from statsbridge.cli import app; app()", "view", str(run), "--no-browser"]
    table = Table(
        "what", "seconds", title=f"{load(run).modules.num_rows} modules, {load(run).scalars.num_rows} scalars"
    )
    server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        with sync_playwright() as playwright:
            executable = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            table.add_row(
                "first picture, nothing loaded before",
                f"{waited(page, lambda: page.goto(address), leads_away=False):.2f}",
            )
            table.add_row("first picture, page loaded again", f"{waited(page, page.reload, leads_away=False):.2f}")
            page.wait_for_selector("#at-module [data-module]")
            page.locator("#at-find").fill("layers.3")
            page.wait_for_timeout(2000)
            leaves = page.locator('#at-module [data-module$="layers.3"]')
            times = [waited(page, leaves.nth(number).click) for number in range(min(clicks, leaves.count()))]
            spread = f"{min(times):.2f} to {max(times):.2f}"
            table.add_row(f"click on a module, median of {len(times)}", f"{statistics.median(times):.2f} ({spread})")
            for name in TABS * 2:
                tab = page.get_by_role("tab", name=name, exact=True)
                table.add_row(f"tab {name}", f"{waited(page, tab.click):.2f}")
            browser.close()
        table.add_row("memory of the server at most, MB", f"{memory_of(server):.0f}")
    finally:
        server.terminate()
        server.wait(30)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a run that is there already")
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--clicks", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or make_run(Path(folder), arguments.modules, arguments.steps)
        CONSOLE.print(measure(run, arguments.clicks))


if __name__ == "__main__":
    main()
