"""The live page on a large run: time to the first picture and from a click to its picture, in Chromium, and memory.

Makes a run of 1,000 modules × 10,000 sampled steps (two sites: 20 million rows, minutes) unless it is given one. Each
click goes to a module that was not looked at before; each tab is opened twice, as what a run was asked once is kept.
Times end with the second frame after what was asked for is there; those of clicks begin with the event of the click, as
the browser dates it.

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
    from playwright.sync_api import Locator, Page

CONSOLE = Console(width=110)
# A run without gradients has a tab or two that say so.
SHOWN = "#content .js-plotly-plot .main-svg, #content .mantine-Alert-root"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
TABS = ("Heat map", "Depth", "Types", "Grid", "Gradient flow", "Updates", "Scalars")
SITES = ("activation", "activation_grad")
TOGETHER = 10  # sampled steps in a part: as one training leaves them whose steps take a tenth of a second
NUMBERS = ("mean", "std", "min", "max", "abs_mean", "l2", "zero_fraction", "skewness", "kurtosis", "kl_unit_gaussian")
# The page says which place its contents are of.
THERE = """() => {
    const wanted = new URLSearchParams(location.search);
    ['find', 'order', 'theme', 'open'].forEach(name => wanted.delete(name));
    const shown = (document.querySelector('#content') || {dataset: {}}).dataset.place;
    return shown !== undefined && shown.replace(/^[?]/, '') === wanted.toString();
}"""

SETTLED = """async before => {{
    const frame = () => new Promise(done => requestAnimationFrame(done));
    const there = {there};
    while (location.search === before || !there() || !document.querySelector('{shown}')) await frame();
    await frame();
    await frame();
    return performance.now() - (window.clicked || 0);
}}"""
FIRST = """async () => {{
    const frame = () => new Promise(done => requestAnimationFrame(done));
    const image = () => document.querySelector('#first-picture img');
    while (!(image() && image().naturalWidth) && !document.querySelector('{shown}')) await frame();
    await frame();
    await frame();
}}"""


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


def settled(page: Page, before: str | None) -> float:
    """Wait until the place asked for is on the screen: the milliseconds then since the last click.

    `before`: the address that it leads away from, None for wherever it is.
    """
    return float(page.evaluate(SETTLED.format(there=THERE, shown=SHOWN), before))


def clicked(page: Page, place: Locator) -> float:
    """Seconds from the event of a click, as the browser dates it, until where it led to is on the screen."""
    before = page.evaluate("() => location.search")
    place.click()
    return settled(page, before) / 1000


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
            page.add_init_script("addEventListener('click', event => { window.clicked = event.timeStamp; }, true)")
            for said, load_page in (
                ("nothing loaded before", lambda: page.goto(address, wait_until="commit")),
                ("page loaded again", lambda: page.reload(wait_until="commit")),
            ):
                begin = time.perf_counter()
                load_page()
                page.wait_for_function("() => document.querySelector('#first-picture, #content')")
                page.evaluate(FIRST.format(shown=SHOWN))
                table.add_row(f"first picture, {said}", f"{time.perf_counter() - begin:.2f}")
                settled(page, None)
                table.add_row(f"all of the page, {said}", f"{time.perf_counter() - begin:.2f}")
            page.wait_for_selector("#at-module [data-module]")
            page.locator("#at-find").fill("layers.3")
            page.wait_for_timeout(2000)
            leaves = page.locator('#at-module [data-module$="layers.3"]')
            times = [clicked(page, leaves.nth(number)) for number in range(min(clicks, leaves.count()))]
            spread = f"{min(times):.2f} to {max(times):.2f}"
            table.add_row(f"click on a module, median of {len(times)}", f"{statistics.median(times):.2f} ({spread})")
            for name in TABS * 2:
                table.add_row(f"tab {name}", f"{clicked(page, page.get_by_role('tab', name=name, exact=True)):.2f}")
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
