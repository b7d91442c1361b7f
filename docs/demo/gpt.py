"""A small GPT over bytes, its data, and low-rank adapters: what the demo trains."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
"""Bytes are the tokens."""


class Block(nn.Module):
    """Attention to earlier tokens, then a small network on each token."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations ``[batch, time, width]`` to the same shape."""
        batch, time, width = x.shape
        split = (batch, time, self.heads, width // self.heads)
        query, key, value = (
            part.view(split).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._drop(self.out(seen.transpose(1, 2).reshape(batch, time, width)))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm_2(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Gpt(nn.Module):
    """A decoder-only transformer; its output layer is tied to its embedding."""

    def __init__(
        self,
        *,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        context: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[batch, time]`` to logits ``[batch, time, 256]``."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each next byte in ``[batch, time + 1]``, in nats."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank correction beside it (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the correction to what the frozen layer gives."""
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def add_adapters(model: Gpt, rank: int = 4) -> list[nn.Parameter]:
    """Freeze `model`, put an adapter beside each linear layer of its blocks, return what trains."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name), rank))
    return [weight for weight in model.parameters() if weight.requires_grad]


def library_text() -> bytes:
    """Return the sources of Python's own library, joined in the order of their names."""
    folder = Path(os.__file__).parent
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


class Batches:
    """Windows of the text in a random order that is new in each epoch; its place can be saved."""

    def __init__(self, text: bytes, *, batch: int, context: int, seed: int) -> None:
        usable = len(text) - len(text) % (context + 1)
        flat = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8)
        self._windows = flat.view(-1, context + 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch_began = self._generator.get_state()
        self._order = torch.randperm(len(self._windows), generator=self._generator)
        self._position = 0

    def next(self) -> torch.Tensor:
        """Return the next windows, ``int64[batch, context + 1]``."""
        if self._position + self._batch > len(self._order):
            self._epoch_began = self._generator.get_state()
            self._order = torch.randperm(len(self._windows), generator=self._generator)
            self._position = 0
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        return self._windows[chosen].long()

    def state_dict(self) -> dict[str, object]:
        """Return where it is: the generator at the beginning of the epoch, and the position."""
        return {"epoch_began": self._epoch_began, "position": self._position}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._epoch_began = state["epoch_began"]
        self._generator.set_state(self._epoch_began)
        self._order = torch.randperm(len(self._windows), generator=self._generator)
        self._position = state["position"]
