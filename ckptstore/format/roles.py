"""Roles of tensors, judged by what the state holds, and then by names.

The role ``optimizer``, ``rng`` or ``data`` is given to what is known to have it: by its structure
(``param_groups`` beside ``state``, moments below numbers, a generator's state), or by a key whose
last word names it (``critic_optimizer``; ``sampler_net`` is a net) over values that such an object
has. Every other tensor has the role ``weights``. The caller can override it by pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ckptstore.argument_checks import check_among
from ckptstore.format.paths import Path, PathFilter, Pattern, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, decode_key, iter_leaves, pairs

ROLES: Final = ("weights", "optimizer", "rng", "data", "extra")
RULE: Final = 2
"""The rule of this module, as manifests record it. By rule 1, words of keys alone decided, and
tensors below unknown keys got the role ``extra``."""

_WORDS: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(words.split())
    for name, words in {
        # The last word of a key names one of these.
        "optimizer": "optimizer optimizers optimiser optimisers optim optims opt opts",
        "schedule": "lr scheduler schedulers sched scaler scalers gradscaler amp",
        "rng": "rng rngs random seed seeds",
        "data": "data datamodule datapipe dataiter dataset datasets dataloader dataloaders loader "
        "loaders sampler samplers",
        # Words that tell nothing; those of networks; and those of optimizers that may be networks.
        "neutral": "state states dict dicts statedict all group groups rank torch cuda cpu numpy",
        "network": "model models module net nets network params parameters ema",
        "weak": "opt opts learned neural meta",
        # Keys of what lies inside.
        "moments": "exp_avg exp_avg_sq exp_inf momentum_buffer square_avg acc_delta",
        "inner": "exp_avg exp_avg_sq exp_inf momentum_buffer square_avg acc_delta state "
        "param_groups mu nu m v momentum trace count",
        "signs": "last_epoch _step_count _last_lr base_lrs scale growth_factor loss_scaler0",
        "layer": "weight bias kernel embedding running_mean running_var",
    }.items()
}
_KINDS: Final = {noun: kind for kind, nouns in list(_WORDS.items())[:4] for noun in nouns}
_CPU_BYTES: Final = 5056
_GENERATOR_BYTES: Final = frozenset({16, 44, _CPU_BYTES, 816016})
"""Sizes of the states of torch's generators, by device."""
_LEAVES: Final = frozenset("TVNBQG")


class Judgement(NamedTuple):
    """The role of a part of a state, and the reason."""

    place: Path
    """Path of the part."""
    role: str
    why: str


class TensorOutline(Protocol):
    """A tensor of a state, saved or not."""

    @property
    def dtype(self) -> str:
        """Torch's name of the element type, without ``torch.``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes by dimension."""

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""


class RoleRules:
    """The rules of one state.

    Parameters
    ----------
    overrides
        Pattern to role; the first pattern that matches a path wins over everything else.
    node
        The skeleton of the state.
    records
        The tensors that `node` refers to.

    Raises
    ------
    InvalidInputError
        An override names something that is not a role.
    """

    def __init__(
        self,
        overrides: Mapping[Pattern, str] | None = None,
        *,
        node: Node = None,
        records: Sequence[TensorOutline] = (),
    ) -> None:
        self._overrides: list[tuple[PathFilter, str, str]] = []
        self._records = records
        self._found: dict[Path, tuple[str, str]] = {}
        for pattern, role in (overrides or {}).items():
            check_among("a role", role, ROLES)
            text = pattern if isinstance(pattern, str) else path_text(pattern)
            self._overrides.append((PathFilter([pattern]), role, f"roles= of {text}"))
        tops = {key: child for key, child in _items(node) if _holds(child)}
        self._tops = frozenset(tops)
        self._flat = not any(_items(child) for child in tops.values())
        self._search(node, _items(node), (), names=2)

    def __call__(self, path: Path) -> str:
        """Return the role of the tensor at `path`."""
        return self.judge(path).role

    def judge(self, path: Path, stored: str = "", rule: int = RULE) -> Judgement:
        """Return the role of the tensor at `path`, and why.

        Parameters
        ----------
        stored
            Its role in a manifest, given by `rule`. Rule 1 took networks of unknown names for
            something else: such a role counts only where the tensor is not weights by this rule.
        """
        for matches, role, why in self._overrides:
            if matches(path):
                return Judgement(path[:1], role, why)
        found = Judgement(() if self._flat else path[:1], "weights", "not known to be another role")
        for length in range(len(path) + 1 if self._found else 0):
            if known := self._found.get(path[:length]):
                found = Judgement(path[:length], *known)
                break
        doubtful = rule < RULE and found.role == "weights" != stored
        if stored in ("", found.role) or doubtful:
            return found
        return Judgement(found.place, stored, "given when it was saved")

    def of_plain(self, path: Path) -> str:
        """Return the role of a value that is no tensor: ``extra`` where no tensors are beside."""
        role = self(path)
        beside = self._flat or path[0] in self._tops
        return role if beside or role != "weights" else "extra"

    # --- parts of a state that are known ------------------------------------------------------

    def _search(
        self, node: Node, items: Sequence[tuple[Any, Node]], path: Path, *, names: int
    ) -> None:
        """Find the parts that are not weights; names count on the next `names` levels."""
        if known := _structure(node, items):
            self._found[path] = known
            return
        small = (self._is_generator(child) or self._nbytes(child) <= 16 for _, child in items)
        lengths = {_CPU_BYTES} if all(small) else set()
        for key, child in items:
            words, inner = _words(key), _items(child)
            known = _structure(child, inner)
            if known is None and words and names:
                known = self._named(words, child)
            if self._is_generator(child, lengths):
                known = "rng", "a generator's state, by its type and length"
            if known is not None and (not self._flat or known[0] == "rng"):
                self._found[(*path, key)] = known
            elif inner:
                below = 0 if _WORDS["network"].intersection(words) else max(names - 1, 0)
                self._search(child, inner, (*path, key), names=below)

    def _named(self, words: Sequence[str], node: Node) -> tuple[str, str] | None:
        """Return the role that a name gives, if the values are such as it names."""
        kind = _KINDS.get(words[-1])
        if kind is None:
            return None
        leaves = iter_leaves(node)
        records = [self._records[leaf.index] for leaf in leaves]
        paths = [[x for k in leaf.path if type(k) is str for x in k.split(".")] for leaf in leaves]
        whole = not any(record.dtype.startswith(("float", "bfloat", "c")) for record in records)
        keys = [key for key, _ in _items(node)]
        fits = {
            "optimizer": not _WORDS["weak"].intersection(words)
            or any(_WORDS["inner"].intersection(path) for path in paths),
            "schedule": all(math.prod(record.shape) <= 1 for record in records)
            and ("lr" in words or not keys or not _WORDS["signs"].isdisjoint(keys)),
            "rng": whole and (words[-1].startswith("rng") or all(map(_is_state, records))),
            "data": whole and not _has_float(node),
        }[kind]
        if not fits or any(
            path and path[-1] in _WORDS["layer"] and _WORDS["inner"].isdisjoint(path)
            for path in paths
        ):
            return None
        return "optimizer" if kind == "schedule" else kind, f"named {words[-1]}"

    def _nbytes(self, node: Node) -> int:
        """Return the size of a tensor that is no view; 0 of all else."""
        whole = isinstance(node, list) and node[0] in ("T", "N")
        return self._records[int(node[1])].nbytes if whole else 0  # type: ignore[index,arg-type]

    def _is_generator(self, node: Node, lengths: Collection[int] = _GENERATOR_BYTES) -> bool:
        return self._nbytes(node) in lengths and _is_state(self._records[int(node[1])])  # type: ignore[index,arg-type]


def _is_state(record: TensorOutline) -> bool:
    """Return whether a tensor has the type and size of a generator's state: torch, NumPy, JAX."""
    if record.dtype == "uint8":
        return len(record.shape) == 1 and record.nbytes in _GENERATOR_BYTES
    keys = record.dtype in ("uint32", "uint64") and record.nbytes <= _CPU_BYTES
    return keys or math.prod(record.shape) <= 1


def _structure(node: Node, items: Sequence[tuple[Any, Node]]) -> tuple[str, str] | None:
    """Return what a part of a state is by its form alone."""
    if isinstance(node, list) and (node[0] == "G" or node[:2] == ["t", "MT19937"]):
        return "rng", "a generator"
    if not items:
        return None
    keys = {key for key, _ in items}
    if {"bit_generator", "state"} <= keys:
        return "rng", "a generator of NumPy"
    if {"param_groups", "state"} <= keys:
        return "optimizer", "it has state and param_groups"
    if all(type(key) is int for key in keys):
        inner = {key for _, child in items for key, _ in _items(child)}
        if not _WORDS["moments"].isdisjoint(inner):
            return "optimizer", "it has moments of numbered parameters"
    return None


def _items(node: Node) -> list[tuple[Any, Node]]:
    """Return keys and nodes of a map, positions and lists of a sequence; nothing of all else."""
    if not isinstance(node, list):
        return []
    if node[0] == "x":
        return _items(node[2])
    if node[0] in MAPS:
        return [(decode_key(key), child) for key, child in pairs(node)]
    if node[0] not in SEQUENCES:
        return []
    items = node[SEQUENCES[str(node[0])] :]
    return [(at, child) for at, child in enumerate(items) if type(child) is list]


def _holds(node: Node) -> bool:
    """Return whether a node is a tensor or holds one."""
    return isinstance(node, list) and (
        node[0] in _LEAVES or any(_holds(child) for _, child in _items(node))
    )


def _has_float(node: Node) -> bool:
    return type(node) is float or (isinstance(node, list) and any(map(_has_float, node)))


def role_of_name(name: str) -> str:
    """Return the role of something that cannot be looked into, by its name alone."""
    kind = _KINDS.get("".join(_words(name)[-1:]), "weights")
    return "optimizer" if kind == "schedule" else kind


def _words(key: object) -> list[str]:
    """Return the words of a name that tell something; none of a path such as ``rng.weight``."""
    words = re.findall("[a-z]+", key.lower()) if type(key) is str and "." not in key else []
    return [word for word in words if len(word) > 1 and word not in _WORDS["neutral"]]
