"""The copy of a run's folder that may be handed to a tracker: the tables, and what identifies the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..log.attempts import FOLDER as ATTEMPTS
from ..log.attempts import attempt_file, read_attempts
from ..log.figures import FOLDER as FIGURES
from ..log.folder import write_json
from ..log.runs import read_info
from ..log.schema import SCHEMAS
from .contract import RunInfo
from .state import FOLDER


@contextmanager
def staged_artifact(run: Path, info: RunInfo, *, figures: bool = False) -> Iterator[Path]:
    """A folder with the run's Parquet parts and a `run.json`; gone afterwards. Raises OSError, LogError.

    Who wrote the run, on which host (`writers/`), and everything of its mirrors stays out; of `run.json` it
    has what `info`, which has been through the gate, lets be known; of attempts only where they began. The
    parts are hard links where the disk has them. `figures`: those that the user logged are in it too.
    """
    (run / FOLDER).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="artifact-", dir=run / FOLDER) as temporary:
        staged = Path(temporary, run.name)
        for table in SCHEMAS:
            for part in sorted((run / table).glob("rank=*/*.parquet")):
                _copy(part, staged / part.relative_to(run))
        for figure in sorted((run / FIGURES).glob("rank=*/*.json")) if figures else ():
            _copy(figure, staged / figure.relative_to(run))
        staged.mkdir(exist_ok=True)
        for attempt in read_attempts(run):
            # Which rows count; but not the settings, which have been through no gate.
            (staged / ATTEMPTS).mkdir(exist_ok=True)
            counts = {"first_step": attempt.first_step, "started": attempt.started}
            write_json(attempt_file(staged, attempt.number), counts)
        known = {"name": info.name, "config": dict(info.config), "versions": dict(info.versions)}
        write_json(staged / "run.json", {**read_info(run), **known})
        yield staged


def _copy(file: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, copy)
    except OSError:
        shutil.copyfile(file, copy)
