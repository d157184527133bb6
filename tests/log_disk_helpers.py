"""Disks that fail: a stand-in for `os` in `statsbridge.log.files`, the only module that changes the log's files."""

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("open", "write", "fsync", "close", "replace", "unlink", "mkdir", "rmdir")


class FailingDisk:
    """The real disk, but operation number `at` (and `more` after it) fails with `code`.

    Where that is a write, half of it is written first. `operations` are the names of what was done since `arm`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.operations: list[str] = []
        self._fails: Callable[[int], bool] = lambda number: False
        self._code = 0
        patch.setattr("statsbridge.log.files.os", self)

    def arm(self, at: int, code: int, more: float = 0) -> None:
        self.operations.clear()
        self._code = code
        self._fails = lambda number: at <= number <= at + more

    def disarm(self) -> None:
        self._fails = lambda number: False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._wrapped(name, real) if name in CHANGES else real

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            number = len(self.operations)
            self.operations.append(name)
            if not self._fails(number):
                # Nothing here loses power, and real syncs would only take their time.
                return None if name == "fsync" else real(*arguments)
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if name == "close":  # as the system does: it is closed all the same
                real(*arguments)
            raise OSError(self._code, os.strerror(self._code))

        return operation


class PowerCut(BaseException):
    """The machine is off: nothing is done any more."""


@dataclass(eq=False)
class File:
    """One file: what was written, and what of it is known to be on the platters."""

    volatile: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None


@dataclass(eq=False)
class Folder:
    """One folder: its names, those that are on the platters, and the changes between the two."""

    names: dict[str, "File | Folder"] = field(default_factory=dict)
    durable: dict[str, "File | Folder"] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, "File | Folder"]] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, node: "File | Folder") -> None:
        """`node` loses the name `old` and gets the name `new`, at once."""
        self.pending.append((old, new, node))
        _apply(self.names, old, new, node)


def _apply(names: dict[str, File | Folder], old: str | None, new: str | None, node: File | Folder) -> None:
    if old is not None and names.get(old) is node:
        del names[old]
    if new is not None:
        names[new] = node


class ModelDisk:
    """A disk that keeps only what was synced, for sure: below `top` it knows what a power cut may leave.

    Each operation is done on the real disk too, so that everything else can read. `cut_at` operations from now the
    power fails (None: never), `fail_at` from now one fails. `operations`: the names of all that were done.
    """

    def __init__(self, top: Path, patch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.root = Folder()
        self.cut_at: int | None = None
        self.fail_at: int | None = None
        self.operations: list[str] = []
        self._open: dict[int, File | Folder] = {}
        patch.setattr("statsbridge.log.files.os", self)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGES:
            return real
        note = getattr(self, f"_note_{name}")

        def operation(*arguments: Any) -> Any:
            self._tick()
            self.operations.append(name)
            # What a sync does here is to be remembered; the real one would only take its time.
            result = None if name == "fsync" else real(*arguments)
            note(result, *arguments)
            return result

        return operation

    def _tick(self) -> None:
        if self.cut_at is not None:
            if self.cut_at <= 0:
                raise PowerCut
            self.cut_at -= 1
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise OSError(errno.EIO, "Input/output error")

    def _place(self, path: Path) -> tuple[Folder, str]:
        *above, name = Path(path).relative_to(self.top).parts
        folder = self.root
        for part in above:
            inner = folder.names[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def _node(self, path: Path) -> File | Folder:
        if Path(path) == self.top:
            return self.root
        folder, name = self._place(path)
        return folder.names[name]

    def _note_open(self, descriptor: int, path: Path, flags: int, mode: int = 0) -> None:
        if flags & os.O_CREAT:
            folder, name = self._place(path)
            folder.change(None, name, File())
        self._open[descriptor] = self._node(path)

    def _note_write(self, written: int, descriptor: int, data: memoryview) -> None:
        node = self._open[descriptor]
        assert isinstance(node, File)
        node.volatile += data[:written]

    def _note_fsync(self, _: None, descriptor: int) -> None:
        node = self._open[descriptor]
        if isinstance(node, File):
            node.durable = bytes(node.volatile)
        else:
            node.durable = dict(node.names)
            node.pending.clear()

    def _note_close(self, _: None, descriptor: int) -> None:
        del self._open[descriptor]

    def _note_replace(self, _: None, old: Path, new: Path) -> None:
        folder, name = self._place(old)
        target, new_name = self._place(new)
        assert target is folder, "a rename between folders needs two syncs"
        folder.change(name, new_name, folder.names[name])

    def _note_unlink(self, _: None, path: Path) -> None:
        folder, name = self._place(path)
        folder.change(name, None, folder.names[name])

    _note_rmdir = _note_unlink

    def _note_mkdir(self, _: None, path: Path) -> None:
        folder, name = self._place(path)
        folder.change(None, name, Folder())

    def after_power_cut(self, target: Path, chance: random.Random) -> None:
        """Write what is left into the empty folder `target`, and go on with that as the disk's content.

        Of the changes of a folder since it was synced any may be there or not; of a file that was never synced,
        anything up to what was written, or zeros.
        """
        self.root = _left(self.root, chance)
        _write_tree(self.root, target)
        self.top, self.cut_at, self.fail_at = target, None, None
        self._open.clear()


def _left(folder: Folder, chance: random.Random) -> Folder:
    names = dict(folder.durable)
    for old, new, node in folder.pending:
        if chance.random() < 0.5:
            _apply(names, old, new, node)
    kept: dict[str, File | Folder] = {}
    for name, node in names.items():
        if isinstance(node, Folder):
            kept[name] = _left(node, chance)
        else:
            content = node.durable
            if content is None:
                content = bytes(node.volatile[: chance.randint(0, len(node.volatile))])
                content = bytes(len(content)) if chance.random() < 0.3 else content
            kept[name] = File(bytearray(content), content)
    return Folder(dict(kept), dict(kept))


def _write_tree(folder: Folder, target: Path) -> None:
    for name, node in folder.names.items():
        if isinstance(node, Folder):
            (target / name).mkdir()
            _write_tree(node, target / name)
        else:
            (target / name).write_bytes(bytes(node.volatile))
