"""An adapter of your own: every value as a line of JSON. docs/adapters.md tells how to install one by its name.

python examples/json_lines_adapter.py
"""

import json
import os
from pathlib import Path

from statsbridge import MirrorError, Retry
from statsbridge.mirror import Destination, Reading


class JsonLines:
    """Writes `<folder>/<run id>.jsonl`, a line `[name, step, time, value]` for each value."""

    backend = "jsonlines"  # the name of its entry point
    keeps = "all"  # of several values at one step
    lacks = frozenset({"histograms", "figures", "artifacts"})
    requires = ""  # the package it needs

    def __init__(self, folder="json-lines"):
        self.folder = Path(folder).absolute()

    def options(self):
        return {"folder": str(self.folder)}

    def destination(self):
        return Destination(self.backend, str(self.folder), explicit=True)

    def open(self, run, destination, memory):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = (self.folder / f"{run.id}.jsonl").open("ab")
        except OSError as error:
            raise MirrorError(f"{self.folder} cannot be written: {error}") from error
        self.memory = memory  # kept with the mirror's cursor
        memory.setdefault("bytes", "0")

    def key(self, series):
        return series.name

    def stored(self, value):
        return value

    def send(self, batch):
        lines = [json.dumps([point.series.name, *point[1:]]) + "\n" for point in batch.points]
        try:
            self.file.truncate(int(self.memory["bytes"]))  # a batch that comes again replaces what was left of it
            self.file.write("".join(lines).encode())
            self.file.flush()
            os.fsync(self.file.fileno())  # returning means: durable
        except OSError as error:
            raise Retry(str(error)) from error
        self.memory["bytes"] = str(os.fstat(self.file.fileno()).st_size)

    def read_back(self, run, destination, memory):
        content = (Path(destination.address) / f"{run.id}.jsonl").read_bytes()
        for line in content[: int(memory["bytes"])].splitlines():
            yield Reading(*json.loads(line))

    def alert(self, event): ...
    def figure(self, name, figure, step): ...
    def artifact(self, path): ...

    def close(self, status):
        self.file.close()


def main():
    """Train a small network, and print the losses that the adapter wrote."""
    import torch
    from torch import nn

    import statsbridge

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, targets = torch.randn(256, 8), torch.randn(256, 1)
    run = statsbridge.init(model, backend=JsonLines(), name="json lines")
    for _ in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()

    lines = (Path("json-lines") / f"{run.id}.jsonl").read_text().splitlines()
    print(f"{len(lines)} values, among them:", *(line for line in lines if line.startswith('["loss"')), sep="\n")
    print(run.path)


if __name__ == "__main__":
    main()
