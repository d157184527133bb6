"""A helper for tests with several processes that train together."""

from __future__ import annotations

import socket
import textwrap
from pathlib import Path
from typing import Any

from mirror_helpers import start_python


def run_ranks(source: str, folder: Path, *arguments: object, **options: Any) -> list[int]:
    """Run `source` on two ranks on this machine; their exit statuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(2):
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        head = f"import os; os.environ.update({ranks!r})\n"
        workers.append(start_python(head + textwrap.dedent(source), folder, *arguments, **options))
    for worker in workers:
        worker.communicate(timeout=120)
    return [worker.returncode for worker in workers]
