"""Saves versions with recipes by hand, and computes the loaded values by torch's own arithmetic.

Codes are made as plainly as possible: the tests compare the reading paths with them, and they use
no code of ckptstore's own encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ckptstore.checkpoint import write
from ckptstore.checkpoint.encode import Draft
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.encodings.codebooks import BOOKS
from ckptstore.encodings.encoding_rules import EncodingRules
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import path_text
from ckptstore.format.tables import Recipe
from ckptstore.hashing import blake3_digest
from ckptstore.model import Version
from ckptstore.states.save import draft_of
from ckptstore.store import Store
from ckptstore.tensors.flatten import flatten

__all__ = ["Form", "save", "saved_as", "stored_bytes"]


@dataclass(frozen=True, slots=True)
class Form:
    """Stored form of one tensor."""

    to: str = ""
    """A cast through a hidden tensor of this dtype."""
    of: str = ""
    """A cast of a visible tensor: its path."""
    code: str = ""
    """Codes with a scale per block."""
    block: int = 256


def stored_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return the elements in the order of memory."""
    return (tensor if order is None else tensor.permute(order)).contiguous().reshape(-1)


def stored_bytes(tensor: torch.Tensor, order: tuple[int, ...] | None = None) -> bytes:
    """Return a tensor's bytes in stored order."""
    flat = stored_order(tensor.detach(), order)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def saved_as(
    tensor: torch.Tensor, form: Form, order: tuple[int, ...] | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the hidden tensors of a lossy form, and the value that a load must give."""
    if form.to:
        hidden = tensor.to(getattr(torch, form.to))
        return [hidden], hidden.to(tensor.dtype)
    flat = stored_order(tensor, order).float()
    count = flat.numel()
    blocks = -(-count // form.block)
    padded = torch.zeros(blocks * form.block)
    padded[:count] = flat
    scales = padded.view(blocks, form.block).abs().amax(1)
    scales[scales < 1e-30] = 0
    shares = padded.view(blocks, form.block) / torch.where(scales > 0, scales, 1)[:, None]
    book = torch.from_numpy(BOOKS[form.code].copy())
    values, places = book.sort()
    middles = (values[1:] + values[:-1]) / 2
    codes = places[torch.bucketize(shares.contiguous(), middles)]
    back = (book[codes] * scales[:, None]).reshape(-1)[:count].to(tensor.dtype)
    whole = codes.reshape(-1)[:count].to(torch.uint8)
    whole = whole.view(torch.int8) if form.code == "linear" else whole
    lay = order or tuple(range(tensor.dim()))
    sizes = [tensor.shape[dim] for dim in lay]
    turned = [lay.index(dim) for dim in range(tensor.dim())]
    return [whole.reshape(sizes).permute(turned), scales], back.reshape(sizes).permute(turned)


def save(
    store: Store,
    state: Any,  # noqa: ANN401 - any state
    forms: Mapping[str, Form],
    *,
    run: str = "gpt",
    step: int = 0,
    change: Mapping[str, Any] | None = None,
) -> tuple[Version, dict[str, torch.Tensor]]:
    """Save a state with recipes for some of its tensors; return also their expected loads.

    Parameters
    ----------
    change
        Fields of every recipe that are set to other values.
    """
    flat = flatten(state, ())
    plain = draft_of(flat, {}, EncodingRules())
    records, sources = list(plain.records), list(plain.sources)
    names = {path_text(path): n for n, t in enumerate(flat.tensors) for path in t.paths}
    leaves = dict(_tensors(state, ""))
    expected: dict[str, torch.Tensor] = {}
    nothing = flatten(torch.empty(0), ()).tensors[0]
    for name, form in forms.items():
        index = names[name]
        record, tensor = records[index], leaves[name].detach()
        hidden: list[torch.Tensor] = []
        if form.of:
            places: tuple[int, ...] = (names[form.of],)
            back = leaves[form.of].detach().to(tensor.dtype)
        else:
            hidden, back = saved_as(tensor, form, record.order)
            places = tuple(range(len(records), len(records) + len(hidden)))
        for one in hidden:
            found = flatten(one, ()).tensors[0]
            order = record.order if one.shape == tensor.shape else None
            records.append(_record(found.dtype, tuple(one.shape), order, record.role))
            sources.append(found)
        given, got = (stored_bytes(t, record.order) for t in (tensor, back))
        recipe = Recipe(
            kind="scaled" if form.code else "cast", sources=places, code=form.code,
            block=form.block if form.code else 0, exact=given == got, digest=blake3_digest(got),
            given=blake3_digest(given),
            max_abs=0.0 if given == got else float((back.double() - tensor.double()).abs().max()),
        )  # fmt: skip
        records[index] = record.replace(recipe=replace(recipe, **(change or {})))
        sources[index] = nothing
        expected[name] = back
    draft = replace(
        plain, sources=sources, records=tuple(records), visible_count=len(plain.records)
    )
    repo = store.repo
    with patch.object(write, "encode_draft", _as_it_is):
        version, _ = write.write_version(
            repo, draft, WriteRequest(run=run, step=step), version=repo.environment.random_hex(16)
        )
    return version, expected


def _as_it_is(draft: Draft, **_: object) -> Draft:
    """Encode nothing: recipes are there already, and no other is to be found."""
    return draft


def _record(
    dtype: str, shape: tuple[int, ...], order: tuple[int, ...] | None, role: str
) -> TensorRecord:
    size = int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize
    return TensorRecord(dtype=dtype, shape=shape, order=order, role=role, nbytes=size)


def _tensors(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if not isinstance(value, dict):
        return []
    return [
        found
        for key, item in value.items()
        for found in _tensors(item, f"{name}.{key}" if name else str(key))
    ]
