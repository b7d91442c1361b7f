"""A store with everything that the page shows, and a server of its page on loopback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from webserver import serving

import ckptstore
from ckptstore.pages.site import page

__all__ = ["EVIL", "Ask", "documents_of", "fill", "served"]

EVIL = "</script><script>alert(1)</script>"

Ask = Callable[..., dict[str, Any]]


def fill(store: ckptstore.Store) -> None:
    """Add two runs and a fork of one."""
    gpt = store.run("gpt", metrics={"val_loss": "min"})

    def state(step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        model = {"w": torch.randn(40, 50, generator=generator), "half": torch.ones(8).bfloat16()}
        model["tied"] = model["w"]
        return {"model": model, "optimizer": {"m": torch.zeros(40, 50)}, EVIL: torch.ones(3)}

    for step, loss in ((0, 3.0), (10, 2.5), (20, 2.2), (30, 4.0), (40, math.nan)):
        gpt.save(state(step), step=step, metrics={"val_loss": loss, "acc": step / 100})
    gpt.rollback(20, reason=EVIL)
    for step, loss in ((30, 2.0), (40, 2.1), (50, 1.9)):
        gpt.save(state(step + 1), step=step, metrics={"val_loss": loss}, metadata={"note": EVIL})
    store.tag("gpt@20", "good")
    store.pin("gpt@0")
    store.remove(["gpt@10"])
    lora = store.fork("gpt@30", "lora", metrics={"val_loss": "min"})
    lora.save({"a": torch.ones(4)}, step=35, metrics={"val_loss": 1.5})
    store.run("other").save({"x": 1}, step=7)
    gpt.set_policy({"full": ["last 1", "tagged"]})
    store.age(["lora@30"], "record")


def documents_of(store: ckptstore.Store) -> Ask:
    """Return what asks the page for a document, which must be there."""

    def ask(name: str, **query: object) -> dict[str, Any]:
        texts = {key: str(value) for key, value in query.items()}
        answer = page(store, f"/page/{name}.json", texts)
        assert answer is not None
        found: dict[str, Any] = json.loads(answer.body)
        assert answer.status == 200, found
        return found

    return ask


@contextmanager
def served(store: ckptstore.Store) -> Iterator[str]:
    """Serve the page of a store, and give its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            answer = page(store, url.path, dict(parse_qsl(url.query, keep_blank_values=True)))
            self.send_response(404 if answer is None else answer.status)
            if answer is not None:
                self.send_header("Content-Type", answer.media_type)
            self.end_headers()
            self.wfile.write(b"" if answer is None else answer.body)

        def log_message(self, *_: object) -> None:
            """Say nothing of a request."""

    with serving(Handler) as address:
        yield address
