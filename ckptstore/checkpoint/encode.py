"""Between a state and its pieces: which tensors are stored in fewer bytes, and with what error.

Derived tensors come first: what is another tensor, rounded, costs nothing and loses nothing. Then
each tensor that a rule takes is measured: read, encoded, restored and compared. If its error is
within the bounds it gets a recipe over hidden tensors, which are encoded again while they are
written; if not, it is stored as it is, and that is logged and noted with the version. A tensor that
the version before holds in the same form, by the digest of what was given, is not encoded at all.

Needs no torch, and no more memory than some steps of a tensor for each thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from ckptstore import limits
from ckptstore.backends.transfers import Threads
from ckptstore.checkpoint import encoded_sources, encoding_trial
from ckptstore.checkpoint.derived_check import KnownCasts, Proved, derived_pairs, prove
from ckptstore.chunking import cut
from ckptstore.encodings.casts import Rounding
from ckptstore.encodings.coding import Form
from ckptstore.encodings.encoding import Encoding
from ckptstore.errors import LimitError
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.names import encode_metadata
from ckptstore.format.tables import Recipe
from ckptstore.objects.sources import Source, copy_from

_log = logging.getLogger("ckptstore")
T = TypeVar("T")
_METADATA_KEY: Final = "kept_lossless"
"""Of a version: a list of names, encodings and reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessFallback:
    """A tensor that is stored as it is, though a lossy rule matched, and why."""

    tensor: str
    encoding: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A state taken apart: everything that a version is to be made of.

    The last three fields are of :func:`encode_draft`.
    """

    sources: Sequence[Source]
    """Where the bytes of each tensor are."""
    records: tuple[TensorRecord, ...]
    """What the manifest says of each, in the same order."""
    frame: bytes
    """The skeleton, encoded."""
    names: Sequence[str] = ()
    """What errors call the tensors; none: by their places."""
    wishes: Mapping[int, Encoding] = field(default_factory=dict)
    """The lossy forms that rules ask for, by place."""
    visible_count: int | None = None
    """How many of the records leaves name: the first so many. None: all."""
    rounding: Rounding | None = None
    """Rounds float32 to bfloat16 faster than NumPy; None: NumPy."""
    fallbacks: Sequence[LosslessFallback] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    """For the receipt; empty if nothing was done."""
    proved: Collection[int] = ()
    """Places of the tensors that were proved to be another one, converted."""

    def name(self, place: int) -> str:
        """Return what a tensor is called."""
        return self.names[place] if place < len(self.names) else f"(tensor {place})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A recipe of one tensor, and the hidden tensors that it is over; of a derived one none."""

    recipe: Recipe
    hidden: Sequence[encoded_sources.CodedSource] = ()
    reused: bool = False


def encode_draft(
    draft: Draft,
    *,
    parent: Manifest | None,
    chunk_bytes: int,
    workers: int,
    derive: bool = True,
    proved: Collection[int] = (),
) -> Draft:
    """Return what is written of a state: with recipes and hidden tensors where they save bytes.

    Parameters
    ----------
    parent
        The version before, whose codes of unchanged tensors are used again.
    chunk_bytes
        The store's chunk size.
    workers
        Threads that measure.
    derive
        Look for tensors that are another one, rounded.
    proved
        Places of the tensors of `parent` that this process proved to be another one.

    Raises
    ------
    TornStateError
        A tensor changed between two readings; it is named.
    """
    work = _Work(
        draft=draft,
        chunk_bytes=chunk_bytes,
        known={} if parent is None else encoding_trial.known_forms(parent),
        parent=parent,
        casts=KnownCasts(parent, proved),
    )
    pairs = work.derived(workers) if derive else {}
    wishes = {place: wish for place, wish in draft.wishes.items() if place not in pairs}
    if not pairs and not wishes:
        return draft
    outcomes: dict[int, _Outcome | str] = {
        low: work.derive(low, high) for low, high in pairs.items()
    }
    coded = _run([partial(work.code, *wish) for wish in wishes.items()], workers)
    outcomes.update(zip(wishes, coded, strict=True))
    return work.result(outcomes)


def _run(tasks: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """Return what the tasks return; the first failure ends those that have not begun."""
    with Threads(workers, thread_name_prefix="ckptstore-measure") as pool:
        return list(pool.map(lambda task: task(), tasks))


@dataclass(slots=True, kw_only=True)
class _Work:
    """One state on its way; its methods for single tensors are called by many threads."""

    draft: Draft
    chunk_bytes: int
    known: Mapping[encoding_trial.Key, Recipe]
    parent: Manifest | None
    casts: KnownCasts
    proved: dict[int, list[Proved]] = field(default_factory=dict)
    """Per tensor that others are derived from: what its pieces were, by each proof."""
    proofs: dict[tuple[int, int], Proved | None] = field(default_factory=dict)
    """Per tensor, and another one that it was compared with: that it follows, or None."""

    # --- derived tensors ------------------------------------------------------------------------

    def derived(self, workers: int) -> dict[int, int]:
        """Return which tensors are another one, converted: all proved, in as many threads."""
        draft = self.draft
        search = partial(
            derived_pairs, draft.sources, draft.records, draft.wishes, samples=dict[int, bytes]()
        )
        likely = search(lambda low, high: True)
        if all(_run([partial(self._same, *pair) for pair in likely.items()], workers)):
            return likely
        return search(self._same)

    def _same(self, low: int, high: int) -> bool:
        """Say whether a tensor is another one, converted; each two are compared once."""
        if (low, high) not in self.proofs:
            one, other = self.draft.sources[low], self.draft.sources[high]
            record, grid = self.draft.records[low], self._grid(other)
            self.proofs[low, high] = prove(
                one, other, record, self.casts, grid, self.draft.rounding
            )
        return self.proofs[low, high] is not None

    # --- one tensor -----------------------------------------------------------------------------

    def derive(self, low: int, high: int) -> _Outcome:
        """Return the recipe of a tensor that is another one, converted."""
        proved = self.proofs[low, high]
        assert proved is not None  # noqa: S101 - the search has asked
        self.proved.setdefault(high, []).append(proved)
        recipe = Recipe(
            kind="cast", sources=(high,), exact=True, digest=proved.digest, given=proved.digest
        )
        return _Outcome(recipe=recipe)

    def code(self, place: int, encoding: Encoding) -> _Outcome | str:
        """Return what becomes of a tensor that a rule takes, or why it is stored as it is."""
        source, record = self.draft.sources[place], self.draft.records[place]
        looked = encoding_trial.look(source, Form.of(encoding, signed=True).step)
        form = Form.of(encoding, signed=looked.seen.negative)
        why = form.problem(looked.seen) or encoding_trial.divides(encoding, record, looked)
        if why:
            return why
        elements = encoded_sources.Elements(source, self.draft.rounding)
        hidden = encoded_sources.coded_sources(record, elements, form)
        again = self._again(place, hidden, encoding, form, looked)
        if again is not None:
            return again
        grids = [self._grid(one.source) for one in hidden]
        measured = encoding_trial.measure(
            elements, form, looked, (grids[0], grids[-1]), self.draft.name(place)
        )
        error = measured.difference
        why = error.problem or encoding_trial.over(encoding, error.max_abs, error.rel_l2)
        if why:
            return why
        return _Outcome(
            recipe=encoding_trial.recipe_of(encoding, form, looked, measured),
            hidden=self._compared(place, hidden, measured.pieces),
        )

    def _again(
        self,
        place: int,
        hidden: Sequence[encoded_sources.CodedSource],
        encoding: Encoding,
        form: Form,
        looked: encoding_trial.TensorFacts,
    ) -> _Outcome | None:
        """Return the codes of the version before, if it was given the same bytes."""
        key = encoding_trial.form_key(looked.given, self.draft.records[place], form)
        recipe = self.known.get(key)
        if recipe is None or encoding_trial.over(encoding, recipe.max_abs, recipe.rel_l2):
            return None
        rows = zip(recipe.sources, hidden, strict=True)
        seen = [self._piece_ids(row, one.source) for row, one in rows]
        known = [ids for ids in seen if ids is not None]
        if len(known) < len(seen):
            return None
        if not recipe.exact:
            recipe = replace(recipe, max_abs_bound=encoding.max_abs, rel_l2_bound=encoding.rel_l2)
        return _Outcome(recipe=recipe, hidden=self._compared(place, hidden, known), reused=True)

    def _compared(
        self,
        place: int,
        hidden: Sequence[encoded_sources.CodedSource],
        seen: Sequence[Sequence[int] | Sequence[bytes]],
    ) -> list[encoded_sources.CodedSource]:
        """Return hidden tensors whose pieces, when they are written, must be those that were seen.

        Parameters
        ----------
        seen
            Per tensor: checksums of its pieces, or their ids where an earlier version has them.
        """
        found = []
        for one, pieces in zip(hidden, seen, strict=False):
            grid, name = self._grid(one.source), self.draft.name(place)
            payload = encoded_sources.checked(one.source.payload, pieces, grid, name)
            ids = [piece for piece in pieces if isinstance(piece, bytes)]
            source = encoded_sources.source_of(one.record, payload, ids)
            found.append(encoded_sources.CodedSource(one.record, source))
        return found

    def _piece_ids(self, row: int, shell: Source) -> list[bytes] | None:
        """Return the ids of the pieces of a tensor of the parent; None if it was cut otherwise."""
        parent = self.parent
        if parent is None:
            return None
        first, last = parent.first[row], parent.first[row + 1]
        lengths = [size for _, size in cut(shell.nbytes, self._grid(shell))]
        if parent.pieces.raw[first:last].tolist() != lengths:
            return None
        return [parent.pieces.ids[at].tobytes() for at in range(first, last)]

    def _grid(self, source: Source) -> int:
        return encoded_sources.grid_of(
            source.nbytes, source.row_bytes, source.itemsize, self.chunk_bytes
        )

    def _unchanged(self, place: int, proofs: Sequence[Proved]) -> Source:
        """Return what is written of a tensor that others are derived from: what was proved of."""
        source, name = self.draft.sources[place], self.draft.name(place)
        record, payload = self.draft.records[place], source.payload
        seen = {one.source for one in proofs}
        if not encoded_sources.is_guarded(payload):
            payload = encoded_sources.ComputedPayload(partial(copy_from, payload))
            for pieces in seen:
                payload = encoded_sources.checked(payload, pieces, self._grid(source), name)
        if len(seen) == 1 and proofs[0].ids:
            return encoded_sources.source_of(record, payload, proofs[0].ids)
        return source if payload is source.payload else encoded_sources.source_of(record, payload)

    # --- all of them ----------------------------------------------------------------------------

    def result(self, outcomes: Mapping[int, _Outcome | str]) -> Draft:
        """Put everything together, hidden tensors after those of the state."""
        draft = self.draft
        records, sources = list(draft.records), list(draft.sources)
        for high, proofs in self.proved.items():
            sources[high] = self._unchanged(high, proofs)
        fallbacks, found = [], dict[int, _Outcome]()
        for place, outcome in sorted(outcomes.items()):
            if isinstance(outcome, str):
                name, wish = draft.name(place), str(draft.wishes[place])
                fallbacks.append(LosslessFallback(tensor=name, encoding=wish, why=outcome))
                _log.warning("%s is saved lossless, not as %s: %s", name, wish, outcome)
                continue
            found[place] = outcome
            recipe, hidden = outcome.recipe, outcome.hidden
            if hidden:
                rows = range(len(records), len(records) + len(hidden))
                recipe = replace(recipe, sources=tuple(rows))
            records[place] = records[place].replace(recipe=recipe)
            sources[place] = encoded_sources.NOTHING
            records += [one.record for one in hidden]
            sources += [one.source for one in hidden]
        return replace(
            draft,
            sources=sources,
            records=tuple(records),
            wishes={},
            visible_count=len(draft.records),
            fallbacks=fallbacks,
            numbers=_numbers(draft.records, found, len(fallbacks)),
            proved=frozenset(place for place, one in found.items() if not one.hidden),
        )


def _numbers(
    records: Sequence[TensorRecord], found: Mapping[int, _Outcome], fallbacks_count: int
) -> dict[str, float]:
    """Return the figures of the receipt that are not 0."""
    derived = [place for place, one in found.items() if not one.hidden]
    coded = {place: one for place, one in found.items() if one.hidden}
    numbers = {
        "derived_count": len(derived),
        "derived_bytes": sum(records[place].nbytes for place in derived),
        "lossy_count": len(coded),
        "lossy_bytes": sum(records[place].nbytes for place in coded),
        "coded_bytes": sum(part.record.nbytes for one in coded.values() for part in one.hidden),
        "rel_l2_max": max((one.recipe.rel_l2 for one in coded.values()), default=0.0),
        "codes_reused_count": sum(one.reused for one in coded.values()),
        "kept_lossless_count": fallbacks_count,
    }
    return {name: float(number) for name, number in numbers.items() if number}


def listing(
    metadata: Mapping[str, Any], fallbacks: Sequence[LosslessFallback]
) -> Mapping[str, Any]:
    """Return metadata that list the tensors; those of the user have precedence, and the room."""
    if not fallbacks:
        return metadata
    listed = [[one.tensor, one.encoding, one.why] for one in fallbacks[: limits.KEPT_LISTED_MAX]]
    more = {_METADATA_KEY: listed, **metadata}
    try:
        encode_metadata(more)
    except LimitError:  # the log has told it
        return metadata
    return more
