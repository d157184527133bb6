"""The module tree: by data flow or by name, searched, and marked where something was found."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .facts import ROOT, ModuleFacts, flow

_OPEN_ALL = 60
"""Up to so many modules the whole tree is open from the start."""
_RANK = {"critical": 0, "warning": 1}
MARKS = {"critical": "!!", "warning": "!"}


@dataclass(frozen=True, slots=True)
class Tree:
    """`nodes`: as the tree component takes them. `expanded`: values of those to open. `matching`: paths found."""

    nodes: list[dict[str, Any]]
    expanded: list[str]
    matching: list[str]


def value_of(path: str) -> str:
    """The value of a module's node. The root's path is empty, which no value may be."""
    return f".{path}"


def grow(
    modules: Mapping[str, ModuleFacts],
    *,
    order: str,
    search: str,
    marks: Mapping[str, str],
    shown: str | None,
) -> Tree:
    """Arrange `modules` as a tree.

    Args:
        modules: path → module.
        order: "depth" for the order of the data flow, "name" for that of the names, numbers in them as numbers.
        search: text to be found in path or type, or a glob for the path; "" for all.
        marks: path → the worst severity found in that module. What a closed branch holds is marked on it, fainter.
        shown: the module to open the tree down to.
    """
    matching = [path for path, module in modules.items() if _fits(module, search.strip())]
    kept = {above for path in matching for above in _with_ancestors(path, modules)}
    children: dict[str | None, list[str]] = {}
    for path in kept:
        children.setdefault(_parent(path, modules), []).append(path)
    below = _worst_below(kept, modules, marks)
    first = _first_inside(kept, modules)

    def key(path: str) -> Any:
        return _natural(path) if order == "name" else first[path]

    def node(path: str) -> dict[str, Any]:
        inside = [node(child) for child in sorted(children.get(path, ()), key=key)]
        made = {"value": value_of(path), **_described(modules[path], marks.get(path), below.get(path), modules)}
        return {**made, "children": inside} if inside else made

    nodes = [node(path) for path in sorted(children.get(None, ()), key=key)]
    return Tree(nodes, _expanded(kept, matching, modules, search, shown, marks), matching)


def _fits(module: ModuleFacts, search: str) -> bool:
    if not search:
        return True
    if any(sign in search for sign in "*?["):
        return fnmatch.fnmatchcase(module.path.lower(), search.lower())
    return search.lower() in (module.path or ROOT).lower() or search.lower() in module.type.lower()


def _parent(path: str, modules: Mapping[str, ModuleFacts]) -> str | None:
    """The nearest module around `path` that was recorded; None at the top."""
    while path:
        path = path.rpartition(".")[0]
        if path in modules:
            return path
    return None


def _with_ancestors(path: str, modules: Mapping[str, ModuleFacts]) -> Iterable[str]:
    at: str | None = path
    while at is not None:
        yield at
        at = _parent(at, modules)


def _worst_below(kept: set[str], modules: Mapping[str, ModuleFacts], marks: Mapping[str, str]) -> dict[str, str]:
    """Path → the worst severity of the modules inside it."""
    worst: dict[str, str] = {}
    for path in kept & marks.keys():
        for above in list(_with_ancestors(path, modules))[1:]:
            if _RANK[marks[path]] < _RANK.get(worst.get(above, ""), len(_RANK)):
                worst[above] = marks[path]
    return worst


def _first_inside(kept: set[str], modules: Mapping[str, ModuleFacts]) -> dict[str, tuple[float, float, str]]:
    """Path → where the data first meets what is in it: a container's own depth is that of its output."""
    first = {path: flow(modules[path]) for path in kept}
    for path in kept:
        for above in _with_ancestors(path, modules):
            first[above] = min(first[above], flow(modules[path]))
    return first


def _expanded(
    kept: set[str],
    matching: list[str],
    modules: Mapping[str, ModuleFacts],
    search: str,
    shown: str | None,
    marks: Mapping[str, str],
) -> list[str]:
    branches = {_parent(path, modules) for path in kept}
    if len(kept) <= _OPEN_ALL:
        return [value_of(path) for path in kept & branches]
    wanted = [path for path in marks if path in kept][:_OPEN_ALL]
    wanted += matching[:_OPEN_ALL] if search else []
    wanted += [shown] if shown in kept else []
    opened = {above for path in wanted if path is not None for above in list(_with_ancestors(path, modules))[1:]}
    top = {path for path in kept if _parent(path, modules) is None}
    return [value_of(path) for path in (opened | top) & branches]


def _natural(path: str) -> list[tuple[int, int, str]]:
    """`blocks.10` behind `blocks.9`."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)|\.", path) if part]


def _described(
    module: ModuleFacts, mark: str | None, below: str | None, modules: Mapping[str, ModuleFacts]
) -> dict[str, Any]:
    """The name of a node and what `moduleNode` of the page's script writes beside it."""
    parent = _parent(module.path, modules)
    worst = mark or below
    told = [module.path or ROOT, module.type]
    told += ["never called"] if module.order is None else [f"depth {module.depth}, order {module.order}"]
    told += [f"{worst} finding {'here' if mark else 'inside'}"] if worst else []
    about = {
        "type": module.type,
        "depth": module.depth,
        "called": module.order is not None,
        "mark": MARKS[worst] if worst else None,
        "severity": f"{worst}{'' if mark else ' inside'}",
        "title": "\n".join(told),
    }
    return {"label": (module.path[len(parent) + 1 :] if parent else module.path) or ROOT, "nodeProps": about}
