"""Which modules a model has: one entry a module, found again by identity.

Nothing is stored on a module and nothing here keeps one alive, so pickle, deepcopy and `torch.save` of the
model see no difference, and a deep copy of the model is not tracked.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

# A wrapper of these kinds is told by the one name under which it registers what it wraps: importing its class
# would import torch._dynamo or torch.distributed for everybody.
_WRAPPED_UNDER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """What is known of the module at one path before it runs.

    Attributes:
        index: its place in `ModuleIndex.entries`; a path keeps it for the life of the index.
        name: dotted path without the prefixes of wrappers; `""` for the root.
        type: name of its class without wrappers: `Linear` for `ParametrizedLinear` and `FSDPLinear`.
        parent: path of the module that holds it, None for a root.
        leaf: whether it has no child modules, parametrizations apart.
        parameters: elements of its own parameters (see `ModuleIndex.parameters` for which are its own).
        in_parametrization: whether it computes a parameter of another module (it, or a module around it).
    """

    index: int
    name: str
    type: str
    parent: str | None
    leaf: bool
    parameters: int
    in_parametrization: bool


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A parameter, the module that owns it and its name there. Holds the parameter: do not keep it.

    `holder` is the module in which it is registered as `key`: of an owner with parametrizations, one of those.
    """

    module: ModuleEntry
    tensor: str
    parameter: nn.Parameter
    holder: nn.Module
    key: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A module where a walk through the model met it first.

    `owner` is the path of the module to which its parameters belong: its own, or that of the module whose
    parameter it computes. `wrappers` are those around it, the outermost first.
    """

    module: nn.Module
    name: str
    parent: str | None
    owner: str
    wrappers: tuple[nn.Module, ...]

    @property
    def prefix(self) -> str:
        """What stands before the name of its parameters at the owner: `parametrizations.weight.`."""
        inside = self.name[len(self.owner) :].removeprefix(".")
        return f"{inside}." if inside else ""


class ModuleIndex:
    """Entries of every module of a model, or of several models, in declaration order.

    Wrappers (DistributedDataParallel, DataParallel, `torch.compile`'s OptimizedModule, CheckpointWrapper,
    FullyShardedDataParallel) have no entry: the module they wrap has it, under the name of the wrapper.
    A module used in several places has one entry, at its first name.

    Args:
        models: a module, whose root is named `""`, or a mapping from the name of each root to its module.
    """

    def __init__(self, models: nn.Module | Mapping[str, nn.Module]) -> None:
        roots = {"": models} if isinstance(models, nn.Module) else models
        self._roots = {name: weakref.ref(unwrapped(root)) for name, root in roots.items()}
        self._given = [weakref.ref(layer) for root in roots.values() for layer in _layers(root)[:-1]]
        self._wrappers: list[weakref.ref[nn.Module]] = []
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], ModuleEntry]] = {}
        self._holders: list[tuple[weakref.ref[nn.Module], int, str]] = []  # module, index of owner, prefix
        self.entries: list[ModuleEntry] = []
        self.refresh()

    def entry(self, module: nn.Module) -> ModuleEntry | None:
        """The entry of this very module, or None where it is not tracked."""
        known = self._by_id.get(id(module))
        # The id of a module that is gone may belong to another one by now.
        return known[1] if known is not None and known[0]() is module else None

    def module(self, entry: ModuleEntry) -> nn.Module | None:
        """The module of an entry, or None where none is left under its name."""
        reference = self._modules.get(entry.index)
        return None if reference is None else reference()

    def modules(self) -> list[nn.Module]:
        """The tracked modules, in declaration order."""
        return [module for reference, _, _ in self._holders if (module := reference()) is not None]

    def roots(self) -> list[nn.Module]:
        """The outermost tracked module of each model."""
        return [module for reference in self._roots.values() if (module := reference()) is not None]

    def wrappers(self) -> list[nn.Module]:
        """The wrappers around tracked modules that were given or lie inside a model."""
        return [module for reference in (*self._given, *self._wrappers) if (module := reference()) is not None]

    @property
    def lazy(self) -> bool:
        """Whether any parameter has no shape before the first forward pass."""
        return any(is_lazy(p) for module in self.modules() for p in module._parameters.values() if p is not None)

    def refresh(self) -> bool:
        """Look at the model again; True if anything changed.

        An entry is a path: it keeps its index, a module put in the place of another takes its entry over, and
        a module that was moved has the entry of its new path. New paths get entries at the end, those that
        are gone keep theirs. A lazy module gets its type and size once it has them.
        """
        places = self._places()
        sizes = _own_sizes(places)
        entries = {entry.name: entry for entry in self.entries}
        before = [self.module(entry) for entry in self.entries], self.entries
        for place in places:
            known = entries.get(place.name)
            index = len(entries) if known is None else known.index
            now = _describe(index, place, sizes.get(place.name, 0))
            # Whoever holds an entry may compare it by identity: the old one stays while it is right.
            entries[place.name] = known if known == now else now
        found = [(weakref.ref(place.module), entries[place.name]) for place in places]
        self.entries = list(entries.values())
        self._modules = {entry.index: reference for reference, entry in found}
        self._by_id = {id(place.module): pair for place, pair in zip(places, found, strict=True)}
        self._wrappers = [weakref.ref(wrapper) for place in places for wrapper in place.wrappers]
        self._holders = [
            (reference, entries[place.owner].index, place.prefix)
            for place, (reference, _) in zip(places, found, strict=True)
        ]
        return before != ([self.module(entry) for entry in self.entries], self.entries)

    def parameters(self) -> list[ParameterEntry]:
        """The parameters of the tracked modules as they are now, in declaration order.

        A tied parameter is listed once, at its first name; a lazy one not before it has a shape. What lies in
        the parametrizations of a module belongs to that module: the two tensors of a weight-normed `fc` are
        `parametrizations.weight.original0` and `…original1` of `fc`. Nothing is recomputed: a parametrized
        tensor itself is never read.
        """
        seen: set[int] = set()
        found = []
        for reference, owner, prefix in self._holders:
            module = reference()
            if module is not None:
                for key, parameter in _own_parameters(module, seen):
                    found.append(ParameterEntry(self.entries[owner], prefix + key, parameter, module, key))
        return found

    def parameter_ids(self) -> list[int]:
        """The ids of all that `parameters` would find, tied ones each time: it is sooner done."""
        modules = (module for reference, _, _ in self._holders if (module := reference()) is not None)
        return [id(p) for module in modules for p in module._parameters.values() if p is not None and not is_lazy(p)]

    def _places(self) -> list[_Place]:
        seen: set[int] = set()
        roots = ((name, reference()) for name, reference in self._roots.items())
        return [place for name, root in roots if root is not None for place in _walk(root, name, None, None, seen)]


def _walk(module: nn.Module, name: str, parent: str | None, owner: str | None, seen: set[int]) -> Iterator[_Place]:
    """The module and those below it, each once, wrappers left out; `owner` where in a parametrization."""
    *wrappers, module = _layers(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield _Place(module, name, parent, name if owner is None else owner, tuple(wrappers))
    for key, child in module._modules.items():
        if child is not None:
            computes = owner is None and _is_parametrizations(module, key)
            below = f"{name}.{key}" if name else key
            yield from _walk(child, below, name, name if computes else owner, seen)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside any number of wrappers."""
    return _layers(module)[-1]


def outermost_called(module: nn.Module) -> nn.Module:
    """What to call where nothing is to be trained: `torch.compile` and DistributedDataParallel are left aside.

    The one would compile, the other send buffers to other processes. Other wrappers change what a call computes.
    """
    for layer in _layers(module):
        if (
            not isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel))
            and "_orig_mod" not in layer._modules
        ):
            return layer
    return module


def _layers(module: nn.Module) -> list[nn.Module]:
    """The wrappers around a module, the outermost first, and itself."""
    layers = [module]
    while True:
        children = module._modules
        keys = [key for key in _WRAPPED_UNDER if key in children]
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            keys = ["module"]
        inner = children[keys[0]] if keys else None
        if inner is None:
            return layers
        layers.append(inner)
        module = inner


def _is_parametrizations(module: nn.Module, key: str) -> bool:
    return key == "parametrizations" and is_parametrized(module)


def _own_sizes(places: Iterable[_Place]) -> dict[str, int]:
    """Elements of the parameters of each owner, by its path."""
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for place in places:
        elements = sum(parameter.numel() for _, parameter in _own_parameters(place.module, seen))
        sizes[place.owner] = sizes.get(place.owner, 0) + elements
    return sizes


def _own_parameters(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters registered on the module itself that are not among the `seen`, and have a shape."""
    for key, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in seen and not is_lazy(parameter):
            seen.add(id(parameter))
            yield key, parameter


def _describe(index: int, place: _Place, size: int) -> ModuleEntry:
    module = place.module
    return ModuleEntry(
        index=index,
        name=place.name,
        type=_type_name(module),
        parent=place.parent,
        leaf=not any(
            child is not None and not _is_parametrizations(module, key) for key, child in module._modules.items()
        ),
        parameters=size,
        in_parametrization=place.name != place.owner,
    )


def _type_name(module: nn.Module) -> str:
    """The class a user wrote: not the subclass torch makes of it for parametrizations and sharding."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", type(module).__name__))
    kind: type = type(module)
    while kind.__module__.startswith(("torch.nn.utils.parametrize", "torch.distributed.")):
        written = [b for b in kind.__bases__ if b is not nn.Module and issubclass(b, nn.Module)]
        if not written or not kind.__name__.endswith(written[0].__name__):
            break
        kind = written[0]
    return kind.__name__
