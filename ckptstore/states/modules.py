"""Modules as targets of a load: tensors to fill, and parts that ``load_state_dict`` fills.

A module is filled in place where loading it is copying to its parameters and persistent buffers.
Where it does more, it is asked to load values, as ``torch.nn.Module.load_state_dict`` asks it: with
its hooks, extra state and metadata, one such part of the target after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from ckptstore.errors import StateError
from ckptstore.format.paths import Path
from ckptstore.format.renames import Renames
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, decode_key, iter_leaves, pairs
from ckptstore.states.lazy import LazyTensor
from ckptstore.tensors.build_state import Builder

EXTRA: Final = "_extra_state"
_Module = torch.nn.Module
_COPYING: Final = (_Module._load_from_state_dict, _NormBase._load_from_state_dict)

State = dict[str, Any]


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers of a module itself, by name."""
    for name, one in {**module._parameters, **module._buffers}.items():
        if one is not None and name not in module._non_persistent_buffers_set:
            yield name, one


def _method(module: torch.nn.Module, name: str) -> object:
    return getattr(getattr(module, name), "__func__", None)


def _copies(module: torch.nn.Module, own: Iterable[torch.Tensor]) -> bool:
    """Return whether a module loads its own tensors by copying values to them."""
    return (
        _method(module, "_load_from_state_dict") in _COPYING
        and not module._load_state_dict_pre_hooks
        and not isinstance(module, torch.jit.ScriptModule)
        and not any(is_lazy(one) or not is_plain(one) for one in own)
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own, in strides."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout == torch.strided


class ModuleTarget:
    """A module of the target.

    Parameters
    ----------
    name
        In the target; empty for the target itself.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.module = module
        self.start = f"{name}." if name else ""
        """Before its names in the target."""
        self.own: dict[str, torch.Tensor] = {}
        """Parameters and persistent buffers, by their names in the target."""
        self.filled: list[str] = []
        """Names of those to fill in place."""
        self.parts: dict[str, dict[str, Node]] = {}
        """What it loads by itself: the prefix of a module, or the name of an extra state, in the
        order of ``load_state_dict``; and the values of each that the version has."""
        self._hooked = self.converts = False
        asked = _method(module, "load_state_dict") is not _Module.load_state_dict
        if asked:
            self.parts[""] = {}
        self._visit(module, "", asked=asked)

    def _visit(self, module: torch.nn.Module, prefix: str, *, asked: bool) -> None:
        self.converts |= bool(module._state_dict_hooks) and any(
            not str(getattr(hook, "__module__", "torch")).startswith("torch.")
            for hook in module._state_dict_hooks.values()
        )
        self.converts |= _method(module, "state_dict") is not _Module.state_dict
        own = {f"{self.start}{prefix}{name}": one for name, one in _own(module)}
        self.own |= own
        if not asked and not _copies(module, own.values()):
            asked = True
            self.parts[prefix] = {}
        if not asked:
            self.filled += own
            if type(module).set_extra_state is not _Module.set_extra_state:
                self.parts[prefix + EXTRA] = {}
            self._hooked |= bool(module._load_state_dict_post_hooks)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{prefix}{name}.", asked=asked)

    @property
    def plain(self) -> bool:
        """Whether it loads by copying alone."""
        return not self.parts and not self._hooked

    def load(
        self, values: Iterator[State], metadata: Mapping[str, Any], missing: list[str]
    ) -> tuple[list[str], list[str], list[str]]:
        """Have the module load what is not copied to it.

        Parameters
        ----------
        values
            Those of each of `parts`, in turn.
        metadata
            Of a state dict, by module.
        missing
            Names that were not copied. Names here are those in the module.

        Returns
        -------
        missing, unexpected, errors
            Names as its hooks left them; and messages.

        Raises
        ------
        StateError
            A hook or method of the module failed.
        """
        unexpected: list[str] = []
        errors: list[str] = []

        def visit(module: torch.nn.Module, prefix: str, state: State | None) -> None:
            if state is None and prefix in self.parts:
                state = next(values)
            if state is not None:
                about = dict(metadata.get(prefix[:-1]) or {})
                module._load_from_state_dict(
                    state, prefix, about, True, missing, unexpected, errors
                )
            elif (name := prefix + EXTRA) in self.parts:
                if extra := next(values):
                    module.set_extra_state(extra[name])
                else:
                    missing.append(name)
            for name, child in module._modules.items():
                below = f"{prefix}{name}."
                if child is not None:
                    part = {k: v for k, v in (state or {}).items() if k.startswith(below)}
                    visit(child, below, None if state is None else part)
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys(missing, unexpected))

        try:
            if _method(self.module, "load_state_dict") is _Module.load_state_dict:
                visit(self.module, "", None)
                return missing, unexpected, errors
            state: Any = OrderedDict(next(values))
            state._metadata = metadata
            told = self.module.load_state_dict(state, strict=False)
        except StopIteration:
            raise
        except Exception as error:  # of the module's own code
            what = f"{type(self.module).__name__}{self.start and f' at {self.start[:-1]!r}'}"
            msg = f"load_state_dict of {what} failed: {error}"
            raise StateError(msg, hint="parameters of the target may have changed") from error
        return [*getattr(told, "missing_keys", ())], [*getattr(told, "unexpected_keys", ())], []

    def converted(self) -> list[str]:
        """Return names of the target that its ``state_dict()`` gives other values than it has."""
        state = self.module.state_dict()
        found = []
        for name, one in self.own.items():
            given = state.get(name.removeprefix(self.start))
            if isinstance(given, torch.Tensor) and not is_lazy(one) and is_plain(one):
                same = given.shape == one.shape and given.to(one.device) == one.to(given.dtype)
                if not torch.all(torch.as_tensor(same) | (given != given)):
                    found.append(name)
        return found


def values_of(node: Node, path: Path, whole: Callable[[Path], bool]) -> Iterator[tuple[Path, Node]]:
    """Yield path and node of what is no container, of empty ones, and of `whole` ones."""
    tag = str(node[0]) if isinstance(node, list) else ""
    start = {**MAPS, **SEQUENCES}.get(tag, 0)
    if not isinstance(node, list) or not start or len(node) == start or whole(path):
        yield path, node
    elif tag in MAPS:
        for key, value in pairs(node):
            yield from values_of(value, (*path, decode_key(key)), whole)
    else:
        for at, item in enumerate(node[start:]):
            yield from values_of(item, (*path, at), whole)


def metadata_of(node: Node, path: Path, renames: Renames) -> dict[str, Any]:
    """Return the ``_metadata`` of the state dicts in a skeleton, by the modules' new names."""
    found: dict[str, Any] = {}
    if not isinstance(node, list) or node[0] not in MAPS:
        return found
    about = dict(pairs(node[1])) if node[0] == "o" and isinstance(node[1], list) else {}
    given = about.get("_metadata")
    for module, values in pairs(given) if isinstance(given, list) and given[0] in MAPS else ():
        if isinstance(module, str) and not iter_leaves(values):
            inside = (*path, *filter(None, (module,)), "_")
            built = Builder({}, (), {}, {}, {}).build(values)
            found[renames.text(inside).rpartition(".")[0]] = built
    for key, value in pairs(node):
        found |= metadata_of(value, (*path, decode_key(key)), renames)
    return found


# --- parameters that are divided among ranks ------------------------------------------------------


def is_divided(tensor: object) -> bool:
    """Return whether a tensor is a DTensor; does not import its module."""
    return type(tensor).__name__ == "DTensor"


def own_part(stored: LazyTensor, own: Any) -> torch.Tensor:  # noqa: ANN401 - a DTensor
    """Return the part of a stored tensor that this rank has of a DTensor; reads no more."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as part_of

    sizes, starts = part_of(own.shape, own.device_mesh, own.placements)
    box = tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))
    return torch.as_tensor(stored[box], device=own.to_local().device)
