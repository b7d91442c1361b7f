"""Roles of tensors, judged by their paths in the state.

The convention looks at the words of the top-level key (``optimizer_states`` has the words
``optimizer`` and ``states``); where that says nothing, at the second key, which must then be one
plain word (the ``model`` of ``{"app": {"model": ...}}``). A state that is itself a state dict,
string keys straight to tensors, is weights. Everything else is ``extra``. The caller of a
save can override it by pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from ckptstore.errors import InvalidInputError
from ckptstore.format.paths import Path, PathFilter, Pattern

ROLES: Final = ("weights", "optimizer", "rng", "data", "extra")

# Schedulers and gradient scalers belong to `optimizer`: they are of use exactly as long as it is.
# The first role that has one of the words wins: "model_optimizer" is optimizer.
_WORDS: Final[Mapping[str, frozenset[str]]] = {
    role: frozenset(words.split())
    for role, words in {
        "rng": "rng rngs random seed seeds",
        "optimizer": "opt opts lr scaler scalers gradscaler amp adam adamw sgd",
        "data": "data datamodule datapipe loader loaders dataiter",
        "weights": "model models module modules net network weight weights param params parameters "
        "buffers ema generator discriminator encoder decoder backbone head teacher student actor "
        "critic policy adapter adapters lora unet vae",
    }.items()
}
_PREFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "rng": ("rng",),
    "optimizer": ("optim", "sched"),
    "data": ("dataset", "dataloader", "sampler"),
    "weights": (),
}
_SPLIT: Final = re.compile(r"[^a-z0-9]+")


def _by_words(text: str) -> str | None:
    if text == "state_dict":
        return "weights"
    words = [word for word in _SPLIT.split(text.lower()) if word]
    for role, known in _WORDS.items():
        if any(word in known or word.startswith(_PREFIXES[role]) for word in words):
            return role
    return None


def _by_convention(path: Path) -> str | None:
    if path and isinstance(path[0], str):
        role = _by_words(path[0])
        if role is not None:
            return role
    if len(path) > 1 and isinstance(path[1], str) and path[1].isalpha():
        return _by_words(path[1])
    return None


class RoleRules:
    """The rules of one save.

    Parameters
    ----------
    overrides
        Pattern to role; the first pattern that matches a path wins over the convention.
    flat
        The state is itself a state dict (see :func:`RoleRules.is_flat`).

    Raises
    ------
    InvalidInputError
        An override names something that is not a role.
    """

    def __init__(
        self, overrides: Mapping[Pattern, str] | None = None, *, flat: bool = False
    ) -> None:
        self._overrides: list[tuple[PathFilter, str]] = []
        self._flat = flat
        self._known: dict[tuple[object, ...], str] = {}
        for pattern, role in (overrides or {}).items():
            if role not in ROLES:
                msg = f"{role!r} is not a role"
                raise InvalidInputError(msg, hint="roles are " + ", ".join(ROLES))
            self._overrides.append((PathFilter([pattern]), role))

    @staticmethod
    def is_flat(paths: Iterable[Path]) -> bool:
        """Return whether every tensor lies straight under a string key, as in a state dict."""
        listed = list(paths)
        return bool(listed) and all(len(p) == 1 and isinstance(p[0], str) for p in listed)

    def __call__(self, path: Path) -> str:
        """Return the role of the tensor at `path`."""
        for matches, role in self._overrides:
            if matches(path):
                return role
        head = tuple((type(key), key) for key in path[:2])
        known = self._known.get(head)
        if known is None:
            known = self._known[head] = self._judge(path)
        return known

    def _judge(self, path: Path) -> str:
        if self._flat:
            # Layer names are not conventions: "data_proj.weight" is a weight, "rng_state" is not.
            named = _by_words(str(path[0])) if str(path[0]).replace("_", "").isalpha() else None
            return named if named == "rng" else "weights"
        return _by_convention(path) or "extra"
