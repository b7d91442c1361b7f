"""The whole conformance suite; :mod:`ckptstore.testing.side_door` shows its use."""

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
    """All requirements of a store for many writers on a backend.

    For storage that promises less, inherit the parts: without ``CreateConformance`` a store may
    only have a single writer, without ``ProcessConformance`` it is limited to one process.
    """
