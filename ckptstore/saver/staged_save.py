"""A save in the background between the call and the engine: what is known of it by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptstore.checkpoint.encode import Draft
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.encodings.encoding import Encoding
from ckptstore.saver.arena import Arena
from ckptstore.saver.save_job import Job, Row, row_of
from ckptstore.saver.save_state import Flight
from ckptstore.saver.staged import Digests, StagedTensor
from ckptstore.saver.staging import Staging

__all__ = ["Departure"]


@dataclass(slots=True, kw_only=True, eq=False)
class Departure:
    """A save on its way to the engine; it has a job once everything is in the arena.

    The saver's lock guards `job`, `cancelled` and `digests`; one thread at a time owns the rest.
    """

    flight: Flight
    request: WriteRequest
    draft: Callable[[], Draft] | None
    """Describes the state; None once it is described."""
    staging: Staging
    arena: Arena
    retain: bool
    """Carry out the run's retention policy afterwards."""
    job: Job | None = None
    cancelled: bool = False
    records: tuple[Row, ...] = ()
    tensors: tuple[StagedTensor, ...] = ()
    frame: bytes = b""
    wishes: Mapping[int, Encoding] = field(default_factory=dict)
    """By place of a record: what it is to be stored in with fewer bits."""
    digests: Digests | None = None
    """Of the state when it was staged; None until they were taken."""

    def describe(self) -> None:
        """Describe the state, and let go of it."""
        assert self.draft is not None  # noqa: S101 - called once
        draft, self.draft = self.draft(), None
        self.records = tuple(map(row_of, draft.records))
        self.tensors = self.staging.describe()
        self.frame = draft.frame
        self.wishes = draft.wishes

    def make_job(self) -> Job:
        """Return what the engine is to do, now that everything is in the arena."""
        return Job(
            number=self.flight.number,
            version=self.flight.version_id,
            arena=self.arena.number,
            tensors=self.tensors,
            records=self.records,
            frame=self.frame,
            wishes=self.wishes,
            request=self.request,
            receipt=self.flight.numbers(),
            retain=self.retain,
        )
