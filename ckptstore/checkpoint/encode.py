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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from ckptstore import limits
from ckptstore.checkpoint.derived_check import KnownCasts, Proved, prove
from ckptstore.checkpoint.encoded_sources import (
    NOTHING,
    Checked,
    Codes,
    CopiedPayload,
    Elements,
    Scales,
    grid_of,
    is_guarded,
    with_payload,
)
from ckptstore.checkpoint.encoding_trial import TensorFacts, look, measure
from ckptstore.checkpoint.lossy_plan import (
    Key,
    divides,
    exceeded,
    form_key,
    hidden_records,
    known_forms,
    over,
    recipe_of,
    shells,
)
from ckptstore.chunking import cut
from ckptstore.encodings.casts import Rounding
from ckptstore.encodings.coding import Form
from ckptstore.encodings.derive import Candidate, derived_pairs
from ckptstore.encodings.encoding import Encoding
from ckptstore.errors import LimitError
from ckptstore.format.manifest import Manifest, TensorRecord
from ckptstore.format.names import encode_metadata
from ckptstore.format.recipes import Recipe
from ckptstore.objects.sources import Payload, Source

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
class _Hidden:
    """A hidden tensor."""

    record: TensorRecord
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What became of one tensor that a rule asked for: a recipe over hidden ones, or a reason."""

    recipe: Recipe | None = None
    hidden: Sequence[_Hidden] = ()
    reused: bool = False
    why: str = ""


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
        known={} if parent is None else known_forms(parent),
        parent=parent,
        casts=KnownCasts(parent, proved),
    )
    pairs = work.derived(workers) if derive else {}
    wishes = {place: wish for place, wish in draft.wishes.items() if place not in pairs}
    tasks = [
        *(lambda low=low, high=high: work.derive(low, high) for low, high in pairs.items()),
        *(lambda place=place, wish=wish: work.code(place, wish) for place, wish in wishes.items()),
    ]
    if not tasks:
        return draft
    outcomes = _run(tasks, workers)
    return work.result(dict(zip((*pairs, *wishes), outcomes, strict=True)), wishes, pairs)


def _run(tasks: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """Return what the tasks return; the first failure ends those that have not begun."""
    with ThreadPoolExecutor(workers, thread_name_prefix="ckptstore-measure") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C as well; it goes on to the caller, once what runs is done
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _candidate(draft: Draft, place: int) -> Candidate:
    record, payload = draft.records[place], draft.sources[place].payload
    whole = record.blocks is None
    return Candidate(
        dtype=record.dtype,
        shape=record.shape,
        order=record.order,
        payload=_plain(payload),
        may_give=whole and place not in draft.wishes,
        may_derive=whole,
    )


def _plain(payload: Payload) -> Payload:
    return payload.unguarded() if is_guarded(payload) else payload


@dataclass(slots=True, kw_only=True)
class _Work:
    """One state on its way; its methods for single tensors are called by many threads."""

    draft: Draft
    chunk_bytes: int
    known: Mapping[Key, Recipe]
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
        candidates = [_candidate(draft, place) for place in range(len(draft.records))]
        likely = derived_pairs(candidates, same=lambda low, high: True)
        tasks = [lambda low=low, high=high: self._same(low, high) for low, high in likely.items()]
        if not tasks or all(_run(tasks, workers)):
            return likely
        return derived_pairs(candidates, same=self._same)

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

    def code(self, place: int, encoding: Encoding) -> _Outcome:
        """Return what becomes of a tensor that a rule asks for."""
        source, record = self.draft.sources[place], self.draft.records[place]
        step = Form.of(encoding, signed=True).step
        looked = look(source, step)
        form = Form.of(encoding, signed=looked.seen.negative)
        why = form.problem(looked.seen) or divides(encoding, record, looked)
        if why:
            return _Outcome(why=why)
        again = self._again(place, encoding, form, looked)
        if again is not None:
            return again
        elements = Elements(source, self.draft.rounding)
        grids = [self._grid(one) for one in shells(source, record, form)]
        name = self.draft.name(place)
        measured = measure(elements, form, looked, (grids[0], grids[-1]), name)
        why = exceeded(encoding, measured)
        if why:
            return _Outcome(why=why)
        pieces = (measured.codes, measured.scales)
        payloads: tuple[Payload, ...] = (Codes(elements, form), Scales(elements, form))
        hidden = [
            _Hidden(
                record=made,
                source=replace(shell, payload=Checked(payload, sums, grid, name)),
            )
            for made, shell, payload, sums, grid in zip(
                hidden_records(record, form),
                shells(source, record, form),
                payloads,
                pieces,
                grids,
                strict=False,
            )
        ]
        return _Outcome(recipe=recipe_of(encoding, form, looked, measured), hidden=hidden)

    def _again(
        self, place: int, encoding: Encoding, form: Form, looked: TensorFacts
    ) -> _Outcome | None:
        """Return the codes of the version before, if it was given the same bytes."""
        source, record = self.draft.sources[place], self.draft.records[place]
        recipe = self.known.get(form_key(looked.given, record, form))
        if recipe is None or over(encoding, recipe.max_abs, recipe.rel_l2):
            return None
        elements, name = Elements(source, self.draft.rounding), self.draft.name(place)
        hidden = []
        for number, (made, shell) in enumerate(
            zip(hidden_records(record, form), shells(source, record, form), strict=True)
        ):
            ids = self._piece_ids(recipe.sources[number], shell)
            if ids is None:
                return None
            payload: Payload = Codes(elements, form) if not number else Scales(elements, form)
            hidden.append(
                _Hidden(
                    record=made,
                    source=with_payload(shell, Checked(payload, ids, self._grid(shell), name), ids),
                )
            )
        if not recipe.exact:
            recipe = replace(recipe, max_abs_bound=encoding.max_abs, rel_l2_bound=encoding.rel_l2)
        return _Outcome(recipe=recipe, hidden=hidden, reused=True)

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
        return grid_of(source.nbytes, source.row_bytes, source.itemsize, self.chunk_bytes)

    def _unchanged(self, place: int, proofs: Sequence[Proved]) -> Source:
        """Return what is written of a tensor that others are derived from: what was proved of."""
        source, name = self.draft.sources[place], self.draft.name(place)
        payload, grid = source.payload, self._grid(source)
        seen = {one.source for one in proofs}
        if not is_guarded(payload):
            payload = CopiedPayload(payload)
            for pieces in seen:
                payload = Checked(payload, pieces, grid, name)
        if len(seen) == 1 and proofs[0].ids:
            return with_payload(source, payload, proofs[0].ids)
        return source if payload is source.payload else with_payload(source, payload)

    # --- all of them ----------------------------------------------------------------------------

    def result(
        self,
        outcomes: Mapping[int, _Outcome],
        wishes: Mapping[int, Encoding],
        derived: Collection[int],
    ) -> Draft:
        """Put everything together, hidden tensors after those of the state."""
        draft = self.draft
        records, sources = list(draft.records), list(draft.sources)
        for high, proofs in self.proved.items():
            sources[high] = self._unchanged(high, proofs)
        fallbacks = []
        numbers = dict.fromkeys(_NUMBERS, 0.0)
        numbers["derived_count"] = float(len(derived))
        for place in sorted(outcomes):
            outcome, record = outcomes[place], draft.records[place]
            if outcome.recipe is None:
                name, wish = draft.name(place), str(wishes[place])
                fallbacks.append(LosslessFallback(tensor=name, encoding=wish, why=outcome.why))
                continue
            recipe = outcome.recipe
            if outcome.hidden:
                recipe = replace(
                    recipe, sources=tuple(range(len(records), len(records) + len(outcome.hidden)))
                )
            records[place] = replace(record, recipe=recipe)
            sources[place] = NOTHING
            records += [one.record for one in outcome.hidden]
            sources += [one.source for one in outcome.hidden]
            _count(numbers, record, outcome)
        numbers["kept_lossless_count"] = float(len(fallbacks))
        for one in fallbacks:
            _log.warning("%s is saved lossless, not as %s: %s", one.tensor, one.encoding, one.why)
        return replace(
            draft,
            sources=sources,
            records=tuple(records),
            wishes={},
            visible_count=len(draft.records),
            fallbacks=fallbacks,
            numbers={name: x for name, x in numbers.items() if x},
            proved=frozenset(derived),
        )


_NUMBERS: Final = (
    "derived_count",
    "derived_bytes",
    "lossy_count",
    "lossy_bytes",
    "coded_bytes",
    "rel_l2_max",
    "codes_reused_count",
    "kept_lossless_count",
)


def _count(numbers: dict[str, float], record: TensorRecord, outcome: _Outcome) -> None:
    assert outcome.recipe is not None  # noqa: S101 - the caller has looked
    if not outcome.hidden:
        numbers["derived_bytes"] += record.nbytes
        return
    numbers["lossy_count"] += 1
    numbers["lossy_bytes"] += record.nbytes
    numbers["coded_bytes"] += sum(one.record.nbytes for one in outcome.hidden)
    numbers["codes_reused_count"] += outcome.reused
    numbers["rel_l2_max"] = max(numbers["rel_l2_max"], outcome.recipe.rel_l2)


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
