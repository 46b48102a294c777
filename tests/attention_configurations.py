"""A seeded generator of attention: functions of scores, masks, shapes, layouts and types, each with its gradients.

A configuration is drawn from a seed alone, so that a failure is named by a number. What it computes is written out in plain
PyTorch and goes through the whole compiler; the reference is the same function in float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kgen.capture.rng import replace_random  # isort: skip  it defines an operator that the other one names
from kgen.capture.recompute_scores import recompute_scores
from tests.codegen import Row

TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
# Errors by norms, against float64.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 6e-3}
SCORES = ("scaled", "softcap", "distance", "bias", "batch bias", "slopes", "squashed")
MASKS = (
    "none", "causal", "causal", "shifted", "strict", "window", "prefix", "lengths", "documents", "padding", "sparse", "two",
)  # fmt: skip
FILLS = (-math.inf, -math.inf, -math.inf, "least", -1e4, -30.0)
SPELLINGS = ("where", "masked_fill", "add")


@dataclass(frozen=True)
class Configuration:
    """What one attention computes, and on what."""

    seed: int
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    sizes: tuple[int, int]
    dtype: torch.dtype
    score: str
    mask: str
    fill: float | str
    spelling: str
    upcast: bool
    transposed: bool

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        mask = f"{self.mask} by {self.spelling} of {self.fill}"
        return f"{self.seed}: {self.score}, {mask}, {kind}, {self.heads}, {self.lengths}, {self.sizes}"

    # ---- arguments --------------------------------------------------------------------------------------------------

    def arguments(self) -> list[Tensor]:
        """Queries, keys, values, and what the score and the mask read: a bias of scores, slopes, lengths, ids, a mask."""
        (h, few), (m, n), (d, v) = self.heads, self.lengths, self.sizes
        shapes = [(self.batch, h, m, d), (self.batch, few, n, d), (self.batch, few, n, v)]
        made = [self._random(k, *shape).to(self.dtype) for k, shape in enumerate(shapes)]
        if self.transposed:
            made = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in made]
        return [*made, *self._captured()]

    def _captured(self) -> list[Tensor]:
        (h, _), (m, n) = self.heads, self.lengths
        draw = random.Random(self.seed + 1)
        of_score = {
            "bias": lambda: self._random(5, 1, h, m, n).to(self.dtype),
            "batch bias": lambda: self._random(5, self.batch, 1, m, n).to(self.dtype),
            "slopes": lambda: self._random(6, h).to(self.dtype),
        }
        of_mask = {
            "lengths": lambda: torch.tensor([draw.randint(1, n) for _ in range(self.batch)]),
            "documents": lambda: torch.stack([torch.arange(max(m, n)) // draw.randint(3, 40) for _ in range(self.batch)]),
            "padding": lambda: torch.stack([torch.arange(n) < draw.randint(1, n) for _ in range(self.batch)]),
            "sparse": lambda: (self._random(7, m, n) > 0) | (torch.arange(n) == 0),
        }
        return [make[key]() for make, key in ((of_score, self.score), (of_mask, self.mask)) if key in make]

    def _random(self, salt: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed * 16 + salt))

    # ---- the function -----------------------------------------------------------------------------------------------

    def function(self, q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Tensor:
        shared = self.heads[0] // self.heads[1]
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        wide = [one.detach() for one in captured if one.is_floating_point()]
        other = [one for one in captured if not one.is_floating_point()]
        s = self._scored(q @ k.transpose(-1, -2), *wide)
        s = s.float() if self.upcast and s.dtype != torch.float64 else s
        return self._masked(s, *other).softmax(-1).to(v.dtype) @ v

    def _scored(self, s: Tensor, *captured: Tensor) -> Tensor:
        rows, columns = _positions(s)
        s = s * (0.7 / math.sqrt(self.sizes[0]))
        return {
            "scaled": lambda: s,
            "softcap": lambda: 2 * torch.tanh(s / 2),
            "distance": lambda: s - 0.05 * (rows - columns).abs(),
            "bias": lambda: s + captured[0],
            "batch bias": lambda: s + captured[0],
            "slopes": lambda: s + captured[0][:, None, None] * 0.1 * (columns - rows),
            "squashed": lambda: s * torch.sigmoid(s),
        }[self.score]()

    def _masked(self, s: Tensor, *captured: Tensor) -> Tensor:
        if self.mask == "none":
            return s
        kept, fill = self._kept(s, *captured), torch.finfo(self.dtype).min if self.fill == "least" else self.fill
        assert isinstance(fill, float)
        if self.spelling == "add":
            return s + torch.where(kept, 0.0, fill).to(s.dtype)
        return torch.where(kept, s, fill) if self.spelling == "where" else s.masked_fill(~kept, fill)

    def _kept(self, s: Tensor, *captured: Tensor) -> Tensor:
        rows, columns = _positions(s)
        m, n = self.lengths
        return {
            "causal": lambda: columns <= rows,
            "shifted": lambda: columns <= rows + (n - m),
            "strict": lambda: columns < rows,
            "window": lambda: (columns <= rows) & (rows - columns < 11),
            "prefix": lambda: (columns <= rows) | (columns < 7),
            "lengths": lambda: columns < captured[0][:, None, None, None],
            "documents": lambda: captured[0][:, None, :m, None] == captured[0][:, None, None, :n],
            "padding": lambda: captured[0][:, None, None, :],
            "sparse": lambda: captured[0],
            "two": lambda: ~((columns > rows) | ((rows % 3 == 1) & (columns % 2 == 1))),
        }[self.mask]()

    # ---- a row of the table -----------------------------------------------------------------------------------------

    def row(self) -> Row:
        """Forward and backward, twice on the same arguments."""
        args = self.arguments()
        return Row(
            str(self), self.function, [args, args], _Agreement(self), externs=None, backward=True,
            before_split=lambda gm: recompute_scores(replace_random(gm), lambda *_: True),
        )  # fmt: skip


class _Agreement:
    """Compares with float64, and the second results with the first ones bit by bit."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration, self.first = configuration, list[Tensor]()

    def __call__(self, sample: Sequence[Any], got: Any, _: Any) -> None:
        from tests.codegen import gradients

        found: list[Tensor] = list(got[0])
        wide = [one.double() if one.is_floating_point() else one for one in sample]
        for number, (mine, right) in enumerate(zip(found, gradients(self.configuration.function)(*wide), strict=True)):
            self._compare(number, mine.double(), right)
        for number, (mine, before) in enumerate(zip(found, self.first, strict=False)):
            assert torch.equal(mine.nan_to_num(), before.nan_to_num()), f"result {number} differs in a second run"
        self.first = self.first or found

    def _compare(self, number: int, mine: Tensor, right: Tensor) -> None:
        nan = [int(one.isnan().sum()) for one in (mine, right)]
        assert torch.equal(mine.isnan(), right.isnan()), f"result {number}: {nan[0]} NaN, not {nan[1]}"
        error, size = float((mine - right).nan_to_num().norm()), float(right.nan_to_num().norm())
        limit = TOLERANCE[self.configuration.dtype] * max(size, 1e-2 * math.sqrt(right.numel()))
        assert error <= limit, f"result {number}: error {error:.3g} above {limit:.3g}"


def drawn(seed: int) -> Configuration:
    """The configuration of a seed."""
    draw = random.Random(seed)
    few = draw.choice((1, 1, 2, 3))
    m = draw.choice((1, 3, draw.randint(2, 70), draw.randint(30, 260)))
    n = m if draw.random() < 0.5 else draw.randint(m, m + 150)
    d = draw.choice((8, 16, 32, 64, draw.randint(3, 96)))
    return Configuration(
        seed, draw.randint(1, 3), (few * draw.choice((1, 1, 2, 4)), few), (m, n),
        (d, d if draw.random() < 0.6 else draw.randint(3, 80)), draw.choice(TYPES), draw.choice(SCORES), draw.choice(MASKS),
        draw.choice(FILLS), draw.choice(SPELLINGS), draw.random() < 0.5, draw.random() < 0.3,
    )  # fmt: skip


def _positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


__all__ = ["Configuration", "drawn"]
