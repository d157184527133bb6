"""Adapters that are each wrong in one way, made from the JSON lines example: the conformance kit must tell."""

from __future__ import annotations

import getpass
import json
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from json_lines_adapter import JsonLines

from statsbridge import Reject, Retry
from statsbridge.mirror import Batch, Event, Reading, Series


class DoublesReplays(JsonLines):
    def send(self, batch: Batch) -> None:
        self.memory["bytes"] = str(os.fstat(self.file.fileno()).st_size)
        super().send(batch)


class LosesOnKill(JsonLines):
    """Says that it is durable while the lines still wait in the process."""

    waiting = ""

    def send(self, batch: Batch) -> None:
        self.waiting += "".join(json.dumps([point.series.name, *point[1:]]) + "\n" for point in batch.points)
        self.memory["bytes"] = str(os.fstat(self.file.fileno()).st_size + len(self.waiting.encode()))

    def close(self, status: str) -> None:
        self.file.write(self.waiting.encode())
        super().close(status)


class ReplacesCharacters(JsonLines):
    def key(self, series: Series) -> str:
        return series.name.replace("/", "_")


class ChangingKeys(JsonLines):
    def key(self, series: Series) -> str:
        return f"{series.name}-{id(self)}"


class RoundsSilently(JsonLines):
    def send(self, batch: Batch) -> None:
        points = [point._replace(value=float(f"{point.value:.6g}")) for point in batch.points]
        super().send(Batch(points))


class StoresZeros(JsonLines):
    def stored(self, value: float) -> float:
        return 0.0

    def send(self, batch: Batch) -> None:
        super().send(Batch([point._replace(value=0.0) for point in batch.points]))


class ForgetsSignOfZero(JsonLines):
    def send(self, batch: Batch) -> None:
        super().send(Batch([point._replace(value=point.value + 0.0) for point in batch.points]))


class DropsNaN(JsonLines):
    def send(self, batch: Batch) -> None:
        super().send(Batch([point for point in batch.points if not math.isnan(point.value)]))


class DropsLateSteps(JsonLines):
    last = -1

    def send(self, batch: Batch) -> None:
        kept = [point for point in batch.points if point.step >= self.last]
        self.last = max([self.last, *(point.step for point in kept)])
        super().send(Batch(kept))


class RejectsLateSteps(DropsLateSteps):
    """Not broken: it says which points it does not take."""

    def send(self, batch: Batch) -> None:
        late = [point for point in batch.points if point.step < self.last]
        super().send(batch)
        if late:
            raise Reject("a step went back", late)


class RoundsSteps(JsonLines):
    def send(self, batch: Batch) -> None:
        super().send(Batch([point._replace(step=int(float(point.step + 1)) - 1) for point in batch.points]))


class KeepsLast(JsonLines):
    keeps = "last"


class OwnTimes(JsonLines):
    def send(self, batch: Batch) -> None:
        super().send(Batch([point._replace(time=point.time + 2_000_000) for point in batch.points]))


class ShowsHistogramsAsValues(JsonLines):
    def read_back(self, run: Any, destination: Any, memory: Mapping[str, str]) -> Iterator[Reading]:
        yield from super().read_back(run, destination, memory)
        yield Reading("activation/std/blocks.0.conv", 1, None, 45.0)


class FailsOnEventsWithoutStep(JsonLines):
    def alert(self, event: Event) -> None:
        int(event.step)


class RejectsDuringOutage(JsonLines):
    def send(self, batch: Batch) -> None:
        try:
            super().send(batch)
        except Retry as error:
            raise Reject(str(error)) from error


class IgnoresOutage(JsonLines):
    def send(self, batch: Batch) -> None:
        try:
            super().send(batch)
        except Retry:
            return


class ImportsEarly(JsonLines):
    def __init__(self, folder: str = "json-lines") -> None:
        import tensorboard  # noqa: F401

        super().__init__(folder)


class TouchesEarly(JsonLines):
    def destination(self) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        return super().destination()


class LooksUpHosts(JsonLines):
    def destination(self) -> Any:
        socket.getaddrinfo("localhost", 80)
        return super().destination()


class ForgetsOptions(JsonLines):
    def options(self) -> dict[str, Any]:
        return {}


class TellsHost(JsonLines):
    def close(self, status: str) -> None:
        self.file.write(socket.gethostname().encode())
        super().close(status)


class TellsUser(JsonLines):
    def close(self, status: str) -> None:
        (self.folder / getpass.getuser()).touch()
        super().close(status)


class TellsFolder(JsonLines):
    def close(self, status: str) -> None:
        self.file.write(str(Path.cwd()).encode())
        super().close(status)


class TellsCommand(JsonLines):
    def close(self, status: str) -> None:
        self.file.write(" ".join(sys.argv).encode())
        super().close(status)
