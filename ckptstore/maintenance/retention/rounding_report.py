"""Errors and bytes of rounding the weights of a version, done or measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedTensor:
    """Result for one tensor, done or measured."""

    path: str
    dtype: str
    """Of the tensor that a load gives back: torch's name."""
    form: str
    """Form of its stored elements from now on, such as ``bf16``; ``unchanged`` if as before."""
    nbytes: int
    """Size of the tensor that a load gives back."""
    max_abs: float = 0.0
    """Largest difference of an element to what was saved, at most."""
    rel_l2: float = 0.0
    """Relative error to what was saved, at most: root of squared differences over squares."""
    problem: str = ""
    """Why it is not in the form that the level asks for; empty if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Result for the weights of one version, done or measured."""

    tensors: tuple[RoundedTensor, ...]
    """Those that the level rounds, or would have; in the order of the state."""
    written_bytes: int
    """Bytes stored for them, encoded, headers included."""
    replaced_bytes: int
    """Size of the pieces that they had before, as far as nothing that stays needs them."""
    kept_bytes: int
    """Size of the pieces that stay where they lie."""

    @property
    def kept_share(self) -> float:
        """The part that stays where it lies, of what its pieces take, from 0 to 1."""
        total = self.kept_bytes + self.replaced_bytes
        return self.kept_bytes / total if total else 1.0

    @property
    def problems(self) -> tuple[RoundedTensor, ...]:
        """Tensors that are not in the form that the level asks for."""
        return tuple(tensor for tensor in self.tensors if tensor.problem)

    @property
    def max_abs(self) -> float:
        """The largest difference of any element to what was saved, at most."""
        return max((tensor.max_abs for tensor in self.tensors), default=0.0)

    @property
    def rel_l2(self) -> float:
        """The largest relative error of any tensor to what was saved, at most."""
        return max((tensor.rel_l2 for tensor in self.tensors), default=0.0)
