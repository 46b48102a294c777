"""A small GPT in plain PyTorch: learned embeddings, pre-norm blocks, causal attention, GELU MLP, tied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of the batches it is trained on."""

    blocks: int = 6
    width: int = 512
    heads: int = 8
    sequence: int = 256
    vocabulary: int = 50257
    batch: int = 2


FULL = Shape()
# Trained on two cores in the time that its compilers take.
SMALL = Shape(blocks=2, width=256, heads=4, sequence=128, vocabulary=8192)
TINY = Shape(blocks=2, width=64, heads=4, sequence=32, vocabulary=509, batch=2)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, sequence, width))


class GPT(nn.Module):
    """Token ids (batch, sequence) and the ids that follow them -> the mean cross-entropy, a float32 scalar."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_initialise)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def random_batch(shape: Shape, device: str, batch: int = 0, sequence: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and targets, of the model's own batch and sequence unless said otherwise."""
    size = (batch or shape.batch, (sequence or shape.sequence) + 1)
    ids = torch.randint(shape.vocabulary, size, device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
