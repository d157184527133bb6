"""What a record names, as small whole numbers: modules, tensors, and what a row of `stats` is about."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...log.schema import SITES
from .layout import Layout
from .memory import Memory

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: A record that names ever new things must not fill the memory: what comes beyond is not looked at.
MOST_IDENTITIES = 1 << 20
_CALLS = 1 << 16
_MOST_LAYOUTS = 64
_MOST_FACTS = 1024
_PARAMETER_GRADIENT = SITES.index("parameter_grad")


class Names:
    """Names and their numbers, in the order in which they were first seen."""

    def __init__(self, *names: str) -> None:
        self.names: list[str] = list(names)
        self._numbers = {name: number for number, name in enumerate(names)}

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def number(self, name: str) -> int:
        """The number of a name; a new one where it has none yet."""
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def numbers(self, column: pa.ChunkedArray | pa.Array) -> Integers:
        """The number of each value of a column of strings; null is `""`."""
        if isinstance(column, pa.ChunkedArray):
            column = column.unify_dictionaries().combine_chunks()
            if isinstance(column, pa.ChunkedArray):  # pyarrow gives a table without rows no chunk to combine
                column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        known = np.array([self.number(name or "") for name in column.dictionary.to_pylist()] + [0], np.int64)
        indices = column.indices
        if indices.null_count:
            known[-1] = self.number("")
            indices = indices.fill_null(len(known) - 1)
        numbers: Integers = known[indices.to_numpy(zero_copy_only=False)]
        return numbers


class Known:
    """Everything that rows were about so far. Each (module, call, site, tensor) has a number, its *identity*.

    Arrays by identity: `module`, `call`, `site` (position in `SITES`), `tensor`, `depth` and `order` (infinite where
    null, as last recorded). By module: `type` (number), `leaf`.
    """

    def __init__(self) -> None:
        self.modules, self.tensors, self.types = Names(), Names(""), Names("")
        self.module, self.call, self.site, self.tensor = (Memory(0, np.int64) for _ in range(4))
        self.depth, self.order = Memory(np.inf), Memory(np.inf)
        self.type, self.leaf = Memory(0, np.int64), Memory(True, np.bool_)
        self._sites, self._roots = Names(*SITES), Names()
        self._root, self._rooted = Memory(0, np.int64), 0
        self._identities: dict[int, int] = {}
        self._inside: dict[int, float] = {}  # by container, as long as there are `_inside_of` identities
        self._inside_of = 0
        self._last_keys = np.zeros(0, np.int64)
        self._last_ids = np.zeros(0, np.int64)
        self._layouts: dict[bytes, Layout] = {}
        self._last_layout = Layout(np.zeros(0, np.int64))
        self._facts: dict[int, tuple[Integers, dict[Hashable, Any]]] = {}

    def __len__(self) -> int:
        return len(self._identities)

    def add_modules(self, table: pa.Table) -> None:
        """Take what the `modules` table says of types and leaves."""
        self._facts.clear()
        modules = self.modules.numbers(table["module"])
        self.type.set(modules, self.types.numbers(table["type"]))
        # What runs without running its children does their work itself: MultiheadAttention, a block of functions.
        called = pc.is_valid(table["order"]).to_numpy()
        names = table["module"].cast(pa.string()).to_pylist()
        above = {parent for name, runs in zip(names, called.tolist(), strict=True) if runs for parent in _above(name)}
        alone = np.array([name not in above for name in names], bool)
        self.leaf.set(modules, table["leaf"].fill_null(True).to_numpy() | (called & alone))

    def identities(self, table: pa.Table) -> Integers:
        """The identity of each row of `stats`; -1 beyond `MOST_IDENTITIES`."""
        module, site = self.modules.numbers(table["module"]), self._sites.numbers(table["site"])
        tensor, call = self.tensors.numbers(table["tensor"]), table["call"].fill_null(0).to_numpy()
        types = self.types.numbers(table["type"])
        if (self.type[module] != types).any():
            self._facts.clear()
            self.type.set(module, types)
        keys = (((tensor << 16) + np.minimum(call, _CALLS - 1) << 4) + site << 24) + module
        if np.array_equal(keys, self._last_keys):  # the same rows as at the step before, as most often
            ids = self._last_ids
        else:
            self._facts.clear()
            unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            numbers = np.array([self._identity(key) for key in unique.tolist()], np.int64)
            ids = numbers[inverse]
            new = numbers >= 0
            rows = first[new]
            for memory, values in ((self.module, module), (self.call, call), (self.site, site), (self.tensor, tensor)):
                memory.set(numbers[new], values[rows])
            self._last_keys, self._last_ids = keys, ids
        return ids

    def layout(self, ids: Integers) -> Layout:
        """The layout of the rows of a step; the same one for the same rows."""
        if not np.array_equal(ids, self._last_layout.ids):
            key = ids.tobytes()
            if key not in self._layouts:
                if len(self._layouts) >= _MOST_LAYOUTS:
                    self._layouts.clear()
                self._layouts[key] = Layout(ids.copy())
            self._last_layout = self._layouts[key]
        return self._last_layout

    def place(self, ids: Integers, depth: Floats, order: Floats) -> None:
        """Note where in the data flow identities lie; NaN where that is not known."""
        for memory, values in ((self.depth, depth), (self.order, order)):
            there = np.where(np.isnan(values), np.inf, values)
            if not np.array_equal(memory[ids], there):
                self._facts.clear()
                memory.set(ids, there)

    def of(self, ids: Integers, what: Hashable, work_out: Callable[[], Any]) -> Any:
        """What follows from identities and from what is known of them; kept for those of a layout."""
        if ids.flags.writeable:
            return work_out()
        known = self._facts.get(id(ids))
        if known is None or known[0] is not ids:
            if len(self._facts) >= _MOST_FACTS:
                self._facts.clear()
            known = self._facts[id(ids)] = (ids, {})
        if what not in known[1]:
            known[1][what] = values = work_out()
            if isinstance(values, np.ndarray):
                values.flags.writeable = False
        return known[1][what]

    def _identity(self, key: int) -> int:
        if key not in self._identities and len(self._identities) >= MOST_IDENTITIES:
            return -1
        return self._identities.setdefault(key, len(self._identities))

    # ------------------------------------------------------------------ what identities are

    def about(self, module: str) -> tuple[str, int | None]:
        """Type and depth of a module, from any of its rows that has one."""
        number = self.modules.number(module)
        depths = self.depth[np.flatnonzero(self.module[np.arange(len(self))] == number)]
        depth = float(np.min(depths, initial=np.inf))
        return self.types.names[int(self.type[number])], int(depth) if np.isfinite(depth) else None

    def site_name(self, identity: int) -> str:
        return self._sites.names[int(self.site[identity])]

    def module_name(self, identity: int) -> str:
        return self.modules.names[int(self.module[identity])]

    def tensor_name(self, identity: int) -> str:
        return self.tensors.names[int(self.tensor[identity])]

    def type_name(self, identity: int) -> str:
        return self.types.names[int(self.type[int(self.module[identity])])]

    def of_site(self, ids: Integers, site: int) -> Flags:
        """Whether each identity is of the site of this position in `SITES`."""
        flags: Flags = self.of(ids, ("site", site), lambda: self.site[ids] == site)
        return flags

    def of_types(self, ids: Integers, types: frozenset[str]) -> Flags:
        """Whether each identity's module is of one of these types."""
        flags: Flags = self.of(ids, types, lambda: self._of_types(ids, types))
        return flags

    def _of_types(self, ids: Integers, types: frozenset[str]) -> Flags:
        wanted = np.array([name in types for name in self.types.names])
        flags: Flags = wanted[self.type[self.module[ids]]]
        return flags

    def leaves(self, ids: Integers) -> Flags:
        flags: Flags = self.of(ids, "leaves", lambda: self.leaf[self.module[ids]])
        return flags

    def biases(self, ids: Integers) -> Flags:
        """Whether each identity's tensor is a bias: those may begin at 0, and have no gradient by design."""
        flags: Flags = self.of(ids, "biases", lambda: self._biases(ids))
        return flags

    def _biases(self, ids: Integers) -> Flags:
        wanted = np.array(["bias" in name for name in self.tensors.names])
        flags: Flags = wanted[self.tensor[ids]]
        return flags

    def modules_of(self, ids: Integers) -> Integers:
        """The number of each identity's module."""
        numbers: Integers = self.of(ids, "modules", lambda: self.module[ids])
        return numbers

    def parameters(self, ids: Integers) -> Integers:
        """A number that the parameter, its gradient and its update have in common."""
        numbers: Integers = self.of(ids, "parameters", lambda: (self.module[ids] << 24) + self.tensor[ids])
        return numbers

    def roots(self, ids: Integers) -> Integers:
        """The number of the model that each belongs to: of several, the first part of the path is its name."""
        numbers: Integers = self.of(ids, "roots", lambda: self._roots_of(ids))
        return numbers

    def _roots_of(self, ids: Integers) -> Integers:
        if "" in self.modules and self.type[self.modules.number("")]:  # tensors logged by hand have no type
            return np.zeros(len(ids), np.int64)
        names = self.modules.names
        for module in range(self._rooted, len(names)):
            self._root.set(module, self._roots.number(names[module].partition(".")[0]))
        self._rooted = len(names)
        numbers: Integers = self._root[self.module[ids]]
        return numbers

    def deepest(self, ids: Integers) -> Floats:
        """For each the largest depth of those of its model; infinite depths do not count."""
        deepest: Floats = self.of(ids, "deepest", lambda: self._deepest(ids))
        return deepest

    def _deepest(self, ids: Integers) -> Floats:
        roots, depth = self.roots(ids), self.depth[ids]
        most = np.full(int(np.max(roots, initial=0)) + 1, -np.inf)
        np.maximum.at(most, roots, np.where(np.isinf(depth), -np.inf, depth))
        return most[roots]

    def _shallowest_inside(self, module: int) -> float:
        """The least depth of the modules inside a container; infinite where none of them runs."""
        if self._inside_of != len(self):
            self._inside_of, self._inside = len(self), {}
        if module not in self._inside:
            name = self.modules.names[module]
            inside = [
                number
                for number, other in enumerate(self.modules.names)
                if number != module and (not name or other.startswith(f"{name}."))
            ]
            ids = np.arange(len(self))
            depths = self.depth[ids[np.isin(self.module[ids], inside)]]
            self._inside[module] = float(np.min(depths, initial=np.inf))
        return self._inside[module]

    def places(self, ids: Integers, *, backward: bool = False) -> Integers:
        """The positions of `ids` in data-flow order: by depth, inner modules before those that hold them.

        `backward`: the order in which gradients arise, from the output to the input. A parameter that a container
        holds itself is used somewhere inside of it, so it comes no sooner than the first module in there that runs.
        """
        positions: Integers = self.of(ids, ("places", backward), lambda: self._places(ids, backward))
        return positions

    def _places(self, ids: Integers, backward: bool) -> Integers:
        depth, order = self.depth[ids], self.order[ids]
        if backward:
            held = ~self.leaves(ids) & (self.site[ids] == _PARAMETER_GRADIENT)
            for place in np.flatnonzero(held).tolist():
                depth[place] = min(depth[place], self._shallowest_inside(int(self.module[ids[place]])))
            depth, order = np.where(np.isinf(depth), np.inf, -depth), np.where(np.isinf(order), np.inf, -order)
        positions: Integers = np.lexsort((ids, order, ~self.leaves(ids), depth))
        return positions


def column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """A numeric column as float64, NaN where null; whole numbers beyond 2^53 are rounded."""
    values: npt.NDArray[Any] = table[name].cast(pa.float64(), safe=False).to_numpy()
    return values


def _above(module: str) -> Iterator[str]:
    """The modules that a module lies in, the root among them."""
    while module:
        module = module.rpartition(".")[0]
        yield module
