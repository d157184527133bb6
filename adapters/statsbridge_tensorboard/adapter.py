"""The adapter: what a mirror calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from statsbridge.errors import ConfigError, MirrorError, Retry
from statsbridge.mirror import Batch, Destination, Event, Histogram, Point, Reading, RunInfo, Series

from .figures import write_figure
from .names import tag_of
from .records import EventFile, Torn, payloads

if TYPE_CHECKING:
    import plotly.graph_objects as go

LATE = "late"
OWN_FILES = "events.out.tfevents.*.statsbridge"
NOT_INSTALLED = "tensorboard is not installed: pip install 'statsbridge[tensorboard]'"


class TensorBoard:
    """Writes event files to `<log_dir>/statsbridge/<run id>`, a run of its own on TensorBoard's page.

    Values are exact: double precision in the file, rounded to float32 by the page. A value logged late, for a step
    before its curve's last, goes to the run `<run id>/late`, because the page takes a step that goes back for a
    restart and drops what it has from there on. Neither host nor user nor command line is written.

    Replay: the mirror's memory holds how many bytes of each file are acknowledged. What lies behind them is cut off
    when the mirror is taken up again, and what follows goes to a new file.

    Args:
        log_dir: a local folder; `runs` in the working folder, as `SummaryWriter` has it, if not given.

    Raises ConfigError where `log_dir` is a URL.
    """

    backend = "tensorboard"
    keeps: Literal["all", "last"] = "all"
    lacks = frozenset({"artifacts"})
    requires = "tensorboard"

    def __init__(self, log_dir: str | Path | None = None) -> None:
        if log_dir is not None and "://" in str(log_dir):
            raise ConfigError(f"log_dir={str(log_dir)!r}: the TensorBoard mirror writes to a local folder")
        self._explicit = log_dir is not None
        self._log_dir = Path("runs" if log_dir is None else log_dir).expanduser().absolute()
        self._tracks: dict[str, _Track] = {}

    def options(self) -> dict[str, Any]:
        """The folder, as an absolute path."""
        return {"log_dir": str(self._log_dir)}

    def destination(self) -> Destination:
        """The folder."""
        return Destination(self.backend, str(self._log_dir), self._explicit)

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        """Cut off what was not acknowledged, and begin a new file; in the first one the configuration.

        Raises Retry where the folder cannot be used now, MirrorError where it never can.
        """
        self._events = _messages()
        self.close("opened again")
        self._memory = memory
        self._folder = _folder(destination, run)
        self._scalars = self._events.Scalars()
        self._created = run.created.timestamp()
        self._last_step: dict[str, int] = {}
        self._step = 0
        lengths = _lengths(memory)
        with _disk_errors(self._folder):
            for path in self._folder.glob(f"**/{OWN_FILES}"):
                _cut(path, lengths.get(path.relative_to(self._folder).as_posix(), 0))
            taken = [*lengths, *(path.name for path in self._folder.glob(f"**/{OWN_FILES}"))]
            self._number = 1 + max((int(name.rsplit("/", 1)[-1].split(".")[3]) for name in taken), default=0)
            self._acknowledge(self._track(""))
        if "described" not in memory:
            self._describe(run)
            memory["described"] = "yes"

    def key(self, series: Series) -> str:
        """The curve's name, which is the tag."""
        return tag_of(series)

    def stored(self, value: float) -> float:
        """The value itself."""
        return value

    def send(self, batch: Batch) -> None:
        """Write the batch, and return when it is on the disk. Raises Retry where the disk does not take it."""
        if batch.attempt > int(self._memory.get("attempt", 0)):
            self._restart(batch)
        current, late = batch.points, list[Point]()
        if current and current[0].step < self._step:
            last = self._last_step
            late = [point for point in current if point.step < last.get(point.series.name, point.step)]
            current = [point for point in current if point.step >= last.get(point.series.name, point.step)]
        with _disk_errors(self._folder):
            written = [
                self._put(name, points, histograms)
                for name, points, histograms in (("", current, batch.histograms), (LATE, late, ()))
                if points or histograms
            ]
        self._acknowledge(*written)
        self._last_step.update((point.series.name, point.step) for point in current)
        self._step = max(self._step, current[-1].step) if current else self._step

    def alert(self, event: Event) -> None:
        """A text for each kind of event, with its step, module and numbers."""
        facts = {name: getattr(event, name) for name in ("step", "module", "site", "tensor", "value", "threshold")}
        lines = [f"{name}: {value}" for name, value in facts.items() if value is not None]
        markdown = f"**{event.severity}**\n\n{_code([event.message, '', *lines])}"
        step = self._step if event.step is None else event.step
        self._text(f"events/{event.kind}", markdown, step, event.time / 1e6)

    def figure(self, name: str, figure: go.Figure, step: int) -> None:
        """A page `figures/<name>.html` beside the event files, and a text that says so: no tab shows Plotly's."""
        with _disk_errors(self._folder):
            path = write_figure(self._folder / "figures", name, figure)
        relative = path.relative_to(self._folder)
        self._text(f"figures/{name}", f"Open in a browser, from this run's folder: `{relative}`", step)

    def artifact(self, path: Path) -> None:
        """Nothing: TensorBoard keeps no files, and the record is on the same disk already."""

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        """All scalars in the event files of this run, in the order of the files.

        Raises MirrorError, after the rest, for files that are missing, cut off or damaged, and where there is none.
        """
        events = _messages()
        folder, lengths = _folder(destination, run), _lengths(memory)
        found = {path.relative_to(folder).as_posix() for path in folder.glob("**/*tfevents*")}
        if not found and not lengths:
            raise MirrorError(f"there is no event file in {folder}")
        damage = []
        for name in sorted({*found, *lengths}):
            path, acknowledged = folder / name, lengths.get(name, 0)
            try:
                data = path.read_bytes()
            except OSError as error:
                damage.append(f"{path} cannot be read: {error.strerror}")
                continue
            if len(data) < acknowledged:
                damage.append(f"{path} has {len(data)} bytes of {acknowledged}")
            try:
                for payload in payloads(data):
                    yield from events.readings(payload)
            except Torn as error:
                # A kill leaves half a record, but only behind what is acknowledged.
                if error.offset < min(acknowledged, len(data)):
                    damage.append(f"{path} is damaged at byte {error.offset} of {len(data)}")
        if damage:
            raise MirrorError("; ".join(damage))

    def close(self, status: str) -> None:
        """Close the files."""
        for track in self._tracks.values():
            track.file.close()
        self._tracks.clear()

    # ------------------------------------------------------------------ inside

    def _track(self, name: str) -> _Track:
        """The event file of this run, or of that of the late values, made when it is first needed."""
        if name not in self._tracks:
            path = self._folder / name / OWN_FILES.replace("*", f"{self._number:010d}")
            path.unlink(missing_ok=True)  # of an attempt that failed
            self._tracks[name] = _Track(EventFile(path, self._events.version(self._created)))
        return self._tracks[name]

    def _put(self, name: str, points: Sequence[Point], histograms: Sequence[Histogram]) -> _Track:
        return self._write(
            name,
            lambda introduced: [
                *self._scalars.events(points, introduced),
                *(self._events.histogram(item, introduced) for item in histograms),
            ],
        )

    def _write(self, name: str, make: Callable[[set[str]], list[bytes]]) -> _Track:
        track = self._track(name)
        track.pending = set(track.introduced)
        track.file.write(make(track.pending))
        return track

    def _acknowledge(self, *tracks: _Track) -> None:
        lengths = _lengths(self._memory)
        for track in tracks:
            track.file.acknowledge()
            track.introduced = track.pending
            lengths[track.file.path.relative_to(self._folder).as_posix()] = track.file.length
        self._memory["files"] = json.dumps(lengths)

    def _restart(self, batch: Batch) -> None:
        """A resumed run goes back to an earlier step; the page is to show what it records from there on."""
        first = batch.points[0] if batch.points else batch.histograms[0]
        with _disk_errors(self._folder):
            # Twice: the slow loader takes the first one that it meets for the beginning.
            track = self._write("", lambda introduced: [self._events.restart(first.step, first.time / 1e6)] * 2)
        self._acknowledge(track)
        self._step, self._last_step = 0, {}
        self._memory["attempt"] = str(batch.attempt)

    def _text(self, name: str, markdown: str, step: int, seconds: float | None = None) -> None:
        now = time.time() if seconds is None else seconds
        with _disk_errors(self._folder):
            track = self._write("", lambda introduced: [self._events.text(name, markdown, step, now, introduced)])
        self._acknowledge(track)

    def _describe(self, run: RunInfo) -> None:
        for name, content in (("config", run.config), ("versions", run.versions)):
            if content:
                lines = json.dumps(dict(content), indent=2, ensure_ascii=False, default=str).splitlines()
                self._text(name, _code(lines), 0, self._created)


class _Track:
    """One event file, and the tags whose kind it has said; `pending`: with those of what was written last."""

    def __init__(self, file: EventFile) -> None:
        self.file = file
        self.introduced: set[str] = set()
        self.pending: set[str] = set()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """OSErrors as what the mirror understands."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise MirrorError(f"{folder} cannot be written: {error}") from error
    except OSError as error:
        raise Retry(f"{folder} cannot be written: {error}") from error


def _messages() -> Any:
    try:
        from . import events
    except ImportError as error:
        raise MirrorError(f"{NOT_INSTALLED} ({error})") from error
    return events


def _folder(destination: Destination, run: RunInfo) -> Path:
    return Path(destination.address) / "statsbridge" / run.id


def _lengths(memory: Mapping[str, str]) -> dict[str, int]:
    lengths: dict[str, int] = json.loads(memory.get("files", "{}"))
    return lengths


def _cut(path: Path, length: int) -> None:
    """Leave `length` bytes of a file; none: no file."""
    if length == 0:
        path.unlink()
    elif path.stat().st_size > length:
        with path.open("r+b") as file:
            file.truncate(length)


def _code(lines: Sequence[str]) -> str:
    """Markdown that shows the lines as they are."""
    return "\n".join("    " + line for text in lines for line in (text.splitlines() or [""]))
