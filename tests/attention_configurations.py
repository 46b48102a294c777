"""A seeded generator of attention: functions of scores, masks, shapes, layouts and types, each with its gradients.

A configuration is drawn from a seed alone, so that a failure is named by a number. What it computes is written out in plain
PyTorch and goes through the whole compiler; the reference is the same function in float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
# What is computed of operands before, and of the result behind.
BEFORE = ("nothing", "nothing", "normed", "rotated", "shifted", "widened")
BEHIND = ("nothing", "nothing", "gated", "beside", "added", "activated")


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
    before: str = "nothing"
    behind: str = "nothing"
    # Whether what the score adds has a gradient.
    learnt: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + (" in float32" if self.upcast else "")
        mask = f"{self.mask} by {self.spelling} of {self.fill}"
        around = f"{self.before} before, {self.behind} behind"
        score = f"learnt {self.score}" if self.learnt else self.score
        return f"{self.seed}: {score}, {mask}, {kind}, {self.batch} x {self.heads}, {self.lengths}, {self.sizes}, {around}"

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
        wide = [one if self.learnt else one.detach() for one in captured if one.is_floating_point()]
        other = [one for one in captured if not one.is_floating_point()]
        left, right = self._before(q), self._before(k)
        s = self._scored(left @ right.transpose(-1, -2), *wide)
        s = s.float() if self.upcast and s.dtype != torch.float64 else s
        return self._behind(self._masked(s, *other).softmax(-1).to(v.dtype) @ v, v)

    def _before(self, x: Tensor) -> Tensor:
        """Queries or keys as scores read them."""
        if self.before == "rotated":
            angles = _positions(x)[0] / torch.arange(1, x.shape[-1] + 1, device=x.device)
            return x * angles.cos().to(x.dtype) + x.flip(-1) * angles.sin().to(x.dtype)
        return {
            "nothing": lambda: x,
            "normed": lambda: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3),
            "shifted": lambda: x + 0.5 * torch.arange(x.shape[-1], device=x.device).to(x.dtype).cos(),
            "widened": lambda: (x.to(torch.promote_types(x.dtype, torch.float32)) * 1.25).to(x.dtype),
        }[self.before]()

    def _behind(self, made: Tensor, v: Tensor) -> Tensor:
        along = torch.arange(made.shape[-1], device=v.device).to(v.dtype)
        return {
            "nothing": lambda: made,
            "gated": lambda: made * torch.sigmoid(made - along.cos()),
            "beside": lambda: made.transpose(1, 2).flatten(2),
            "added": lambda: made + along.cos(),
            "activated": lambda: torch.nn.functional.silu(made.to(torch.promote_types(made.dtype, torch.float32))).to(v.dtype),
        }[self.behind]()

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
    made = Configuration(
        seed, draw.randint(1, 3), (few * draw.choice((1, 1, 2, 4)), few), (m, n),
        (d, d if draw.random() < 0.6 else draw.randint(3, 80)), draw.choice(TYPES), draw.choice(SCORES), draw.choice(MASKS),
        draw.choice(FILLS), draw.choice(SPELLINGS), draw.random() < 0.5, draw.random() < 0.3,
    )  # fmt: skip
    return _with_more(made, draw)


def drawn_large(seed: int) -> Configuration:
    """The configuration of a seed in sizes that all kernels of a GPU take: most have heads of 64 or 128 in 16 bits."""
    made, draw = drawn(seed), random.Random(-1 - seed)
    m = draw.choice((draw.randint(1, 150), draw.randint(100, 400), draw.randint(300, 900), 128 * draw.randint(1, 6)))
    n = m if draw.random() < 0.5 else draw.randint(m, m + 400)
    d = draw.choice((64, 64, 128, 128, made.sizes[0], 8 * draw.randint(1, 20), 256))
    v = d if draw.random() < 0.8 else draw.choice((64, 128, made.sizes[1]))
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32))
    return replace(made, lengths=(m, n), sizes=(d, v), dtype=dtype)


def _with_more(made: Configuration, draw: random.Random) -> Configuration:
    learnt = made.score in ("bias", "batch bias") and draw.random() < 0.5
    return replace(made, before=draw.choice(BEFORE), behind=draw.choice(BEHIND), learnt=learnt)


def _positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


__all__ = ["Configuration", "drawn", "drawn_large"]
