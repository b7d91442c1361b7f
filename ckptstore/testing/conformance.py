"""The conformance suite as a whole; see :mod:`ckptstore.testing.side_door` for how to use it."""

from __future__ import annotations

from ckptstore.testing.conform_create import CreateConformance, ProcessConformance
from ckptstore.testing.conform_listing import ListingConformance
from ckptstore.testing.conform_objects import ObjectConformance

__all__ = [
    "BackendConformance",
    "CreateConformance",
    "ListingConformance",
    "ObjectConformance",
    "ProcessConformance",
]


class BackendConformance(
    ObjectConformance, ListingConformance, CreateConformance, ProcessConformance
):
    """Everything that a store for many writers asks of a backend.

    For storage that promises less, inherit the parts: without ``CreateConformance`` a store may
    only have a single writer, without ``ProcessConformance`` it lives in one process.
    """
