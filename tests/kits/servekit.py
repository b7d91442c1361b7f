"""Stores with tiny models, and servers of them in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import torch
from ports import LOOPBACK, free_port
from transformers import LlamaConfig, LlamaForCausalLM

from ckptstore.integrations.pretrained import describe_model
from ckptstore.model import Version
from ckptstore.serving.serving_limits import REFRESH_S
from ckptstore.store import Store

__all__ = ["Server", "read_whole", "save_llama", "served", "settle", "tiny_llama"]


def tiny_llama(*, dtype: torch.dtype = torch.float32, tied: bool = False, seed: int = 0) -> Any:  # noqa: ANN401 - of transformers
    """Return a Llama of 100,000 random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def save_llama(store: Store, name: str, model: Any, **options: Any) -> Version:  # noqa: ANN401
    """Save a model and its description to a run."""
    state = {"model": model.state_dict(), "pretrained": describe_model(model)}
    run = store.run(name, metrics={"val_loss": "min"})
    return run.save(state, **{"step": 1, "roles": {"pretrained": "weights"}, **options})


@dataclass(frozen=True)
class Server:
    """A running ``ckptstore serve``."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def get(
        self, path: str, *, method: str = "GET", **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of one request; no redirect is followed."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, method=method, headers=named)  # noqa: S310
        opener = urllib.request.build_opener(_Straight)
        try:
            with opener.open(request, timeout=120) as answer:
                return answer.status, _named(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, _named(error.headers), error.read()

    def logged(self, word: str) -> str:
        """Return the log once it has a word: a line is written after its answer."""
        while word not in (log := self.log.read_text()):
            time.sleep(0.01)  # the time limit of the test is what ends it otherwise
        return log

    def stop(self, by: signal.Signals = signal.SIGTERM) -> int:
        """Stop it, and return its exit status."""
        self.process.send_signal(by)
        return self.process.wait(120)


def _named(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class _Straight(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401
        return None


@contextmanager
def served(
    store: str,
    folder: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
) -> Iterator[Server]:
    """Serve a store on a port of loopback for the length of a block."""
    port = free_port()
    log = folder / f"serve-{port}.log"
    command = [sys.executable, "-m", "ckptstore", "serve", "--store", store, "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *options], stdout=out, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    server = Server(f"http://{LOOPBACK}:{port}", process, log)
    try:
        if wait:
            _wait(server)
        yield server
    finally:
        process.kill()
        process.wait(120)


def _wait(server: Server) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            server.get("/healthz")
        except OSError:
            assert server.process.poll() is None, server.log.read_text()
            assert time.monotonic() < end, server.log.read_text()
            time.sleep(0.05)
        else:
            return


def settle() -> None:
    """Wait until a server finds what was just saved."""
    time.sleep(REFRESH_S + 0.1)


def read_whole(parts: Iterator[memoryview]) -> bytes:
    """Return the bytes of a stream."""
    return b"".join(parts)
