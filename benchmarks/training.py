"""A small GPT, trained for a few seconds on real text: the source of the values in the states.

Training decides how well checkpoints compress. Weights drawn from a normal distribution
would do for weights; for Adam's second moments, which span ten orders of magnitude and hold exact
zeros for unused rows, they would not. So the values are those of a real, short training.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "Gpt", "Trained", "kind_of", "stepper", "train", "update"]

_TEXT_BYTES = 2 << 20
_VOCABULARY = 256
_HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Values after training, by kind of parameter (``qkv.weight``, ``embed.weight``, ...).

    Each entry holds three flat float32 tensors of one length: master weights, first moments,
    second moments. All layers' parameters of one kind follow one another. Rows that no gradient
    ever reached (bytes that the text does not hold) are left out: their moments are zeros, which
    would compress to nothing.
    """

    values: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    steps: int
    loss: float


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        batch, time, width = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, time, 3, _HEADS, width // _HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden: torch.Tensor = self.down(functional.gelu(self.up(self.ln2(x))))
        return x + hidden


class Gpt(nn.Module):
    """A GPT over bytes."""

    def __init__(self, width: int, layers: int, time: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each place."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln(x))
        return logits


@cache
def train(*, seed: int, steps: int, width: int = 192, layers: int = 3) -> Trained:
    """Train from a seed; return the values. Takes about 0.1 s a step on two cores.

    Parameters
    ----------
    seed
        Seed of the initial weights and of the batches.
    steps
        Updates of AdamW; the learning rate falls on a cosine from 1e-3 to 1e-4.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        return _train(steps, width, layers, time=128, batch=8)
    finally:
        torch.random.set_rng_state(state)


def stepper(*, seed: int, width: int = 192, layers: int = 3) -> Callable[[], None]:
    """Return a function that makes one update of a new model, as a training loop does."""
    torch.manual_seed(seed)
    text, time, batch = _text(), 128, 8
    model = Gpt(width, layers, time)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))

    def step() -> None:
        update(model, optimizer, text, time, batch)

    return step


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, time: int, batch: int
) -> torch.Tensor:
    """Make one update; return the loss.

    Parameters
    ----------
    text
        One token a byte; the batch is drawn from it.
    time, batch
        Tokens of a row, and rows.
    """
    at = torch.randint(0, text.numel() - time - 1, (batch,))
    rows = text[at[:, None] + torch.arange(time + 1)].long()
    logits = model(rows[:, :-1])
    loss = functional.cross_entropy(logits.reshape(-1, _VOCABULARY), rows[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def _train(steps: int, width: int, layers: int, *, time: int, batch: int) -> Trained:
    text = _text()
    model = Gpt(width, layers, time)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = update(model, optimizer, text, time, batch)
        schedule.step()
    collected: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        three = (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"])
        used = moments["exp_avg_sq"].reshape(len(parameter), -1).any(1)
        flat = tuple(tensor[used].reshape(-1).clone() for tensor in three)
        collected.setdefault(kind_of(name), []).append(flat)
    values = {
        kind: (
            torch.cat([flat[0] for flat in flats]),
            torch.cat([flat[1] for flat in flats]),
            torch.cat([flat[2] for flat in flats]),
        )
        for kind, flats in collected.items()
    }
    return Trained(values=values, steps=steps, loss=loss.item())


def kind_of(name: str) -> str:
    """Return the kind of a parameter: its name without the number of the layer."""
    parts = name.split(".")
    return ".".join(parts[2:]) if parts[0] == "blocks" else name


def _text() -> torch.Tensor:
    """Return the beginning of Python's own library sources, one token a byte."""
    data = bytearray()
    for path in _sources():
        data += path.read_bytes()
        if len(data) >= _TEXT_BYTES:
            break
    return torch.frombuffer(data[:_TEXT_BYTES], dtype=torch.uint8)


def _sources() -> Iterator[Path]:
    yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
