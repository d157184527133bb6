"""The kit that any adapter must pass, on a folder and on a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aim_helpers import aim_server
from statsbridge_aim import Aim

from statsbridge import testing

CHECKS = (
    testing.check_names,
    testing.check_values,
    testing.check_steps,
    testing.check_order,
    testing.check_channels,
    testing.check_replay,
    testing.check_crash,
)


def test_keys_and_destination(tmp_path: Path) -> None:
    for make in (lambda: Aim(tmp_path), Aim, lambda: Aim("aim://127.0.0.1:1")):
        testing.check_key(make)
        testing.check_destination(make)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_folder(check: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    check(lambda: Aim(tmp_path / "repository"), tmp_path / "made")


@pytest.mark.slow
def test_server(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "repository").mkdir()
    with aim_server(tmp_path / "repository") as server:
        address = f"aim://127.0.0.1:{server.port}"

        @contextlib.contextmanager
        def gone() -> Iterator[None]:
            server.kill()
            yield
            server.start()

        testing.check_values(lambda: Aim(address), tmp_path / "made")
        testing.check_outage(lambda: Aim(address, timeout=15), tmp_path / "made", gone)


@pytest.mark.slow
def test_restricted(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    store = tmp_path / "repository"
    testing.check_restricted(lambda: Aim(store), tmp_path / "made", store, more=["aim_helpers"])
