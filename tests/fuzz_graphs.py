"""Random programs of tensor operations, as Python source: what is run is what a report shows.

A program is grown line by line against real tensors: a line that raises, overflows or grows too large is dropped and another
one tried. Whatever jumps (comparisons, rounding, positions of extremes) is kept away from ties, so that two ways of rounding
may not differ by more than their rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from shrinking import smallest

MAX_NUMEL = 6000
MAX_VALUE = 200.0
SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 64, 67)

PRELUDE = """\
import torch
import torch.nn.functional as F

g = torch.Generator().manual_seed({seed})
randn = lambda *shape: torch.randn(shape, generator=g)
randint = lambda top, *shape: torch.randint(0, top, shape, generator=g)
"""


@dataclass(frozen=True)
class Program:
    """`inputs` are (name, expression), `lines` the statements of each step, `outputs` names; `sizes` are numbers with names
    that the expressions of inputs use."""

    seed: int
    inputs: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def source(self) -> str:
        body = "".join(f"    {statement}\n" for line in self.lines for statement in line.split("\n"))
        names = ", ".join(name for name, _ in self.inputs)
        given = "".join(f"{name} = {expr}\n" for name, expr in (*self.sizes, *self.inputs))
        results = "".join(f"{name}, " for name in self.outputs)
        return f"{PRELUDE.format(seed=self.seed)}{given}\n\ndef f({names}):\n{body}    return ({results})\n"

    def load(self) -> tuple[Callable[..., Any], list[torch.Tensor]]:
        """The function, and fresh arguments."""
        space: dict[str, Any] = {}
        exec(compile(self.source(), f"<fuzz {self.seed}>", "exec"), space)
        return space["f"], [space[name] for name, _ in self.inputs]

    def smaller(self) -> Iterator[Program]:
        """Programs with one part less, the shortest first; many of them do not run."""
        for name in self.outputs:
            if len(self.outputs) > 1:
                yield replace(self, outputs=(name,))
        for k in reversed(range(len(self.lines))):
            yield replace(self, lines=self.lines[:k] + self.lines[k + 1 :])
        for name in self.outputs:
            if len(self.outputs) > 1:
                yield replace(self, outputs=tuple(o for o in self.outputs if o != name))
        for line in self.lines:  # earlier results in place of the last ones
            name = line.split(" = ")[0]
            if name.isidentifier() and name not in self.outputs:
                yield replace(self, outputs=(name,))


def shrunk(program: Program, fails: Callable[[Program], bool], attempts: int = 60) -> Program:
    """A program in which no single part can be left out without losing the failure."""
    return smallest(program, fails, _size, runs, attempts)


def _size(program: Program) -> tuple[int, int, int]:
    last = max((k for k, line in enumerate(program.lines) if line.split(" = ")[0] in program.outputs), default=0)
    return len(program.lines), len(program.outputs), last


def runs(program: Program) -> bool:
    try:
        f, args = program.load()
        with torch.no_grad():
            f(*args)
    except Exception:
        return False
    return True


# ---- growing --------------------------------------------------------------------------------------------------------


@dataclass
class Grower:
    """State of one program's growth; `env` holds the tensors that its names stand for."""

    seed: int
    rng: random.Random
    dtype: torch.dtype
    inputs: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    env: dict[str, torch.Tensor] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)  # names of storages that may be written
    most: int = MAX_NUMEL

    def pick(self, *kinds: str, rank: int = 0) -> str:
        """A name of one of the kinds (float, int, bool, any), late ones more often."""
        names = [n for n, t in self.env.items() if t.dim() >= rank and ("any" in kinds or kind_of(t) in kinds)]
        if not names:
            raise Dropped
        return names[min(int(self.rng.triangular(0, len(names), len(names))), len(names) - 1)]

    def dim(self, name: str) -> int:
        return self.rng.randrange(self.env[name].dim())

    def number(self) -> float:
        return round(self.rng.uniform(-2, 2), 3)


class Dropped(Exception):
    """There is nothing to apply this operation to."""


def kind_of(t: torch.Tensor) -> str:
    return "bool" if t.dtype is torch.bool else "float" if t.dtype.is_floating_point else "int"


def grow(seed: int, steps: int = 9) -> Program:
    """The program of a seed: always the same one."""
    rng = random.Random(seed)
    dtype = rng.choices([torch.float32, torch.bfloat16, torch.float64], [7, 2, 1])[0]
    g = Grower(seed, rng, dtype)
    exec(PRELUDE.format(seed=seed), g.space)
    _add_inputs(g)
    tries = 0
    while len(g.lines) < steps and tries < 40 * steps:
        tries += 1
        try_line(g, OPERATIONS)
    made = [n for n in g.env if n.startswith("v")]
    outputs = made[-2:] + [n for n in made[:-2] if rng.random() < 0.25]
    return Program(seed, tuple(g.inputs), tuple(g.lines), tuple(outputs or list(g.env)[:1]))


def _add_inputs(g: Grower) -> None:
    rng = g.rng
    base = [rng.choice(SIZES) for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))]
    while _product(base) > MAX_NUMEL:
        base[rng.randrange(len(base))] = rng.choice((1, 2, 3, 5))
    if rng.random() < 0.06:
        base[rng.randrange(len(base))] = 0
    for k in range(rng.choice((1, 2, 2, 3))):
        shape = list(base)
        if k and rng.random() < 0.5:  # broadcast against the first
            shape = [1 if rng.random() < 0.4 else n for n in shape][rng.randrange(len(shape)) :]
        kind = "float" if k == 0 else rng.choices(["float", "int", "bool"], [5, 2, 1])[0]
        name, expr = f"x{k}", _input(g, kind, shape)
        g.inputs.append((name, expr))
        exec(f"{name} = {expr}", g.space)
        g.env[name] = g.space[name]
        if is_writable(g.env[name]):
            g.owned.add(name)


def _input(g: Grower, kind: str, shape: Sequence[int]) -> str:
    how = g.rng.choices(["plain", "turned", "stepped", "offset", "expanded"], [5, 2, 2, 1, 1])[0]
    order = list(shape)
    suffix = ""
    if how == "turned" and len(shape) > 1:
        order, suffix = order[::-1], f".permute({', '.join(map(str, reversed(range(len(shape)))))})"
    elif how == "stepped" and shape:
        order[-1], suffix = 2 * order[-1], "[..., ::2]"
    elif how == "offset" and shape:
        order[0], suffix = order[0] + 1, "[1:]"
    elif how == "expanded" and shape and shape[0] > 1:
        order[0], suffix = 1, f".expand({', '.join(map(str, shape))})"
    numbers = ", ".join(map(str, order))
    if kind == "float":
        return f"randn({numbers}).to({g.dtype}){suffix}"
    return f"randint(9, {numbers}){suffix}" if kind == "int" else f"(randn({numbers}) > 0){suffix}"


def is_writable(t: torch.Tensor) -> bool:
    return all(s or n <= 1 for s, n in zip(t.stride(), t.shape, strict=True))


Operation = Callable[[Grower, str], str]


def try_line(g: Grower, operations: Mapping[Operation, int]) -> bool:
    """Adds one statement, or leaves everything as it was, inputs that the statement wanted included."""
    make = g.rng.choices(list(operations), list(operations.values()))[0]
    name = f"v{len(g.lines)}"
    before, inputs, state = {n: t.clone() for n, t in g.env.items()}, len(g.inputs), g.space["g"].get_state()
    try:
        line = make(g, name)
        exec(line, g.space)
        result = g.space.get(name)
        fine = all(_is_tame(g, t) for t in g.env.values()) and (
            result is None or (isinstance(result, torch.Tensor) and _is_tame(g, result))
        )
    except Exception:
        fine = False
    if fine:
        g.lines.append(line)
        if result is not None:
            g.env[name] = result
        return True
    g.space.pop(name, None)
    for n, t in before.items():  # a write that went too far
        if not torch.equal(g.env[n], t):
            g.env[n].copy_(t)
    for n, _ in g.inputs[inputs:]:
        g.env.pop(n, None)
        g.owned.discard(n)
    del g.inputs[inputs:]
    g.space["g"].set_state(state)
    return False


def _is_tame(g: Grower, t: torch.Tensor) -> bool:
    if t.numel() > g.most or t.dim() > 5:
        return False
    return kind_of(t) == "bool" or bool((t.isfinite() & (t.abs() <= MAX_VALUE)).all())


def _product(numbers: Sequence[int]) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


# ---- operations: each gives the statements that define `name` -------------------------------------------------------------


def unary(g: Grower, name: str) -> str:
    a = g.pick("float")
    return f"{name} = " + g.rng.choice(
        (
            f"torch.tanh({a})", f"torch.sigmoid({a})", f"torch.exp(-{a}.abs())", f"torch.sin({a})", f"torch.cos({a})",
            f"{a}.abs()", f"-{a}", f"torch.relu({a})", f"torch.sqrt({a}.abs() + 0.1)", f"torch.log1p({a}.abs())",
            f"{a} * {a} * 0.1", f"1 / ({a}.abs() + 1)", f"F.gelu({a})", f"F.silu({a})", f"torch.erf({a})",
            f"{a}.clamp(-1, 1.5)", f"{a} * {g.number()}", f"{a} + {g.number()}", f"torch.rsqrt({a}.abs() + 0.5)",
            f"torch.atan({a})", f"F.softplus({a})", f"F.leaky_relu({a})",
        )
    )  # fmt: skip


def integer(g: Grower, name: str) -> str:
    a = g.pick("int")
    return f"{name} = " + g.rng.choice(
        (
            f"-{a}",
            f"{a}.abs()",
            f"~{a}",
            f"{a} % 7",
            f"{a} // 3",
            f"{a} * 3 - 1",
            f"{a} & 5",
            f"{a} << 1",
            f"{a} ^ 3",
            f"{a}.sign()",
        )
    )


def binary(g: Grower, name: str) -> str:
    a, b = g.pick("float"), g.pick("float", "float", "int", "bool")
    return f"{name} = " + g.rng.choice(
        (
            f"{a} + {b}", f"{a} - {b}", f"{a} * {b}", f"torch.maximum({a}, {b} * 1.0)", f"torch.minimum({a}, {b} * 1.0)",
            f"{a} / ({b}.abs() + 1)" if kind_of(g.env[b]) != "bool" else f"{a} * {b}", f"torch.atan2({a}, {b} * 1.0 + 3)",
            f"torch.hypot({a}, {a} * 0.5)", f"torch.lerp({a}, {a} * 2, 0.3)",
        )
    )  # fmt: skip


def compare(g: Grower, name: str) -> str:
    if g.dtype is torch.bfloat16 or g.rng.random() < 0.4:  # exact operands only
        a = g.pick("int")
        return f"{name} = {a} {g.rng.choice(('>', '<=', '==', '!='))} {g.rng.randrange(6)}"
    return f"{name} = {g.pick('float')} {g.rng.choice(('>', '<'))} {g.rng.uniform(-1, 1):.6f}"


def logic(g: Grower, name: str) -> str:
    a, b = g.pick("bool"), g.pick("bool")
    return f"{name} = " + g.rng.choice((f"~{a}", f"{a} & {b}", f"{a} | {b}", f"{a} ^ {b}", f"{a}.to(torch.int64)"))


def select(g: Grower, name: str) -> str:
    c, a = g.pick("bool"), g.pick("float")
    other = g.rng.choice((g.pick("float"), str(g.number())))
    return f"{name} = " + g.rng.choice((f"torch.where({c}, {a}, {other})", f"{a}.masked_fill({c}, {g.number()})"))


def cast(g: Grower, name: str) -> str:
    a = g.pick("any")
    if kind_of(g.env[a]) != "float":
        return f"{name} = {a}.to({g.rng.choice(('torch.float32', 'torch.int32', 'torch.float64'))})"
    if g.dtype is torch.bfloat16:  # only there: comparisons of float32 values near a rounding to 16 bits are ties
        return f"{name} = {a}.to({g.rng.choice(('torch.float32', 'torch.bfloat16'))})"
    if g.rng.random() < 0.5:
        return f"{name} = {a}.to({g.rng.choice(('torch.float32', 'torch.float64'))})"
    return f"{name} = torch.floor({a} * 2.3 + 0.123457).to(torch.int64)"


def reduction(g: Grower, name: str) -> str:
    a = g.pick("float", "float", "float", "int", "bool", rank=1)
    t = g.env[a]
    dims = sorted(g.rng.sample(range(t.dim()), g.rng.randint(1, min(2, t.dim()))))
    where = "" if g.rng.random() < 0.15 else f"{dims[0]}" if len(dims) == 1 else f"{dims}"
    keep = ", keepdim=True" if where and g.rng.random() < 0.5 else ""
    inside = f"{where}{keep}"
    if kind_of(t) == "bool":
        return f"{name} = {a}.{g.rng.choice(('sum', 'any', 'all'))}({inside})"
    if kind_of(t) == "int":
        return f"{name} = " + g.rng.choice((f"{a}.sum({inside}) % 50", f"{a}.amax({inside})", f"{a}.amin({inside})"))
    return f"{name} = " + g.rng.choice(
        (
            f"{a}.sum({inside}) * 0.1", f"{a}.mean({inside})", f"{a}.amax({inside})", f"{a}.amin({inside})",
            f"torch.logsumexp({a}, {where or list(range(t.dim()))}{keep})", f"torch.tanh({a}).prod({dims[0]}{keep})",
            f"torch.var({a}, {where or list(range(t.dim()))}, correction=0{keep})",
            f"torch.linalg.vector_norm({a}, 2, {where or None}{keep})",
        )
    )  # fmt: skip


def normalise(g: Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    d = g.dim(a)
    return f"{name} = " + g.rng.choice(
        (
            f"{a}.softmax({d})", f"{a}.log_softmax({d})", f"F.layer_norm({a}, {a}.shape[{d}:], eps=0.1)",
            f"{a} - {a}.mean({d}, keepdim=True)", f"{a} / ({a}.abs().sum({d}, keepdim=True) + 1)",
            f"F.rms_norm({a}, {a}.shape[-1:], eps=0.1)",
        )
    )  # fmt: skip


def view(g: Grower, name: str) -> str:
    a = g.pick("any", rank=1)
    t, rng = g.env[a], g.rng
    d, e = g.dim(a), g.dim(a)
    n = t.shape[d]
    start = rng.randrange(n) if n else 0
    return f"{name} = " + rng.choice(
        (
            f"{a}.transpose({d}, {e})", f"{a}.reshape({_factors(rng, t.numel())})", f"{a}.unsqueeze({d})", f"{a}.flip({d})",
            f"{a}.roll({rng.randrange(5)}, {d})", f"{a}.narrow({d}, {start}, {n - start})", f"{a}.select({d}, {start})",
            f"{a}[{':, ' * d}{start}::{rng.choice((1, 2, 3))}]", f"{a}.reshape(-1)", f"{a}.squeeze()",
            f"{a}.unsqueeze(0).expand({rng.choice((2, 3))}, {', '.join(['-1'] * t.dim())})", f"{a}.chunk(2, {d})[0]",
            f"{a}.diagonal(0, {d}, {e})", f"{a}.unfold({d}, {max(1, min(2, n))}, 1)", f"{a}.contiguous()",
            f"{a}.movedim({d}, {e})",
        )
    )  # fmt: skip


def _factors(rng: random.Random, numel: int) -> str:
    """A random shape of so many elements."""
    shape, left = [], numel
    while left > 1 and len(shape) < 3:
        factor = rng.choice([f for f in range(2, left + 1) if left % f == 0])
        shape.append(factor)
        left //= factor
    return ", ".join(map(str, [*shape, left] if left != 1 or not shape else shape))


def index(g: Grower, name: str) -> str:
    a = g.pick("float", "int", rank=1)
    t, rng = g.env[a], g.rng
    d = g.dim(a)
    n = t.shape[d]
    if n == 0:
        raise Dropped
    count = rng.choice((1, 3, 8, 17))
    where = f"(torch.arange({count}) * {rng.randrange(1, 7)} + {rng.randrange(9)}) % {n}"
    if rng.random() < 0.4:
        where = f"{g.pick('int')}.reshape(-1)[:{count}].abs() % {n}"
    order = list(t.shape)
    order[d] = count
    grid = f"(torch.arange({_product(order)}) % {n}).reshape({order})"
    lead = ":, " * d
    return f"{name} = " + rng.choice(
        (
            f"{a}[{lead}{where}]",
            f"{a}.index_select({d}, {where})",
            f"{a}.gather({d}, {grid})",
            f"{a}[{where} % {t.shape[0]}] * 1",
        )
    )


def scatter(g: Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    t, d = g.env[a], g.dim(a)
    n = t.shape[d]
    if n == 0:
        raise Dropped
    where = f"(torch.arange({n}) * {g.rng.randrange(1, 4)}) % {n}"
    flipped = f"torch.arange({n}).flip(0)"
    return f"{name} = " + g.rng.choice(
        (
            f"{a}.index_add({d}, {where}, {a} * 0.5)", f"{a}.index_copy({d}, {flipped}, {a} * 2)",
            f"torch.zeros_like({a}).index_add({d}, {where}, {a})",
            f"{a}.index_put(({flipped.replace(str(n), str(t.shape[0]))},), {a} * 0.5, accumulate=True)",
            f"{a}.index_fill({d}, ({where})[:2], 0.25)",
            f"{a}.scatter_add({d}, ({where}).reshape({_along(d, t.dim())}).expand({a}.shape), {a})",
            f"{a}.slice_scatter({a}.narrow({d}, 0, 1) * 2, {d}, 0, 1)",
            f"{a}.select_scatter({a}.select({d}, 0) + 1, {d}, {n - 1})",
        )
    )  # fmt: skip


def _along(d: int, rank: int) -> str:
    return ", ".join("-1" if k == d else "1" for k in range(rank))


def scan(g: Grower, name: str) -> str:
    a = g.pick("float", "int", rank=1)
    d = g.dim(a)
    if kind_of(g.env[a]) == "int":
        return f"{name} = {a}.cumsum({d}) % 100"
    return f"{name} = " + g.rng.choice(
        (f"{a}.cumsum({d}) * 0.1", f"torch.tanh({a}).cumprod({d})", f"{a}.cummax({d})[0]", f"torch.logcumsumexp({a}, {d})")
    )


def join(g: Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    d = g.dim(a)
    same = [n for n, t in g.env.items() if t.shape == g.env[a].shape]
    b = g.rng.choice(same)
    return f"{name} = " + g.rng.choice(
        (
            f"torch.cat([{a}, {b}], {d})", f"torch.cat([{a}, {a} * 2, {b}.to({a}.dtype)], {d})",
            f"torch.stack([{a}, {b}], {d})", f"F.pad({a}, (1, 2))", f"F.pad({a}, (-1, 1), value=0.5)",
            f"{a}.repeat({', '.join(['2'] + ['1'] * (g.env[a].dim() - 1))})", f"{a}.repeat_interleave(2, {d})",
            f"torch.cat([{a}.narrow({d}, 0, 1), {a}], {d})", f"{a}.tril()", f"{a}.triu(1)",
        )
    )  # fmt: skip


def mutate(g: Grower, name: str) -> str:
    """Writes into a copy, through a view of it, or into an input."""
    rng = g.rng
    if g.owned and rng.random() < 0.35:
        a = rng.choice(sorted(g.owned))
        if kind_of(g.env[a]) != "float":
            return f"{a}.logical_not_()" if kind_of(g.env[a]) == "bool" else f"{a}.add_(1)"
        return rng.choice((f"{a}.mul_(0.5)", f"{a}.add_(1)", f"{a}[0] = 0.5", f"{a}.copy_({a}.flip(0))", f"{a}.tanh_()"))
    a = g.pick("float", rank=1)
    t, d = g.env[a], g.dim(a)
    n = t.shape[d]
    copy = f"{name} = {a}.clone()"
    writes = (
        f"{name}.mul_(0.5)", f"{name}.select({d}, {max(n - 1, 0)}).add_(1)", f"{name}[0].copy_({name}[-1] * 2)",
        f"{name}.transpose(0, -1).add_(0.25)", f"{name}[1:].mul_(0.3)", f"{name}[..., ::2] = 0.5",
        f"{name}.view(-1)[:3].zero_()", f"{name}.index_add_({d}, torch.arange({n}).flip(0), {a})",
        f"{name}.masked_fill_({name}.isnan(), 1)", f"{name}.diagonal().fill_(2)",
        f"{name}[torch.arange({t.shape[0]}).flip(0)] = {a} * 2", f"{name}.clamp_(-1, 1)",
        f"{name}.addcmul_({a}, {a}, value=0.1)",
    )  # fmt: skip
    return "\n".join([copy, *rng.sample(writes, rng.choice((1, 2, 2)))])


def contract(g: Grower, name: str) -> str:
    a = g.pick("float", rank=2)
    return f"{name} = " + g.rng.choice(
        (f"({a} @ {a}.transpose(-1, -2)) * 0.05", f"F.linear({a}, {a}.reshape(-1, {a}.shape[-1])[:3]) * 0.1")
    )


def pool(g: Grower, name: str) -> str:
    a = g.pick("float", rank=3)
    return f"{name} = " + g.rng.choice(
        (
            f"F.avg_pool1d({a}[:1] if {a}.dim() == 3 else {a}[0, :1], 2, 1)",
            f"F.max_pool1d({a}.reshape(1, {a}.shape[0], -1), 3, 2, 1)",
            f"F.interpolate({a}.reshape(1, {a}.shape[0], -1), scale_factor=2)",
        )
    )


def create(g: Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    return f"{name} = " + g.rng.choice(
        (
            f"{a} + torch.arange({a}.shape[-1]) * 0.1",
            f"torch.full_like({a}, 0.5)",
            f"torch.zeros({a}.shape[0]) + 1",
            f"torch.arange({a}.shape[0]) % 5",
        )
    )


#: Operation -> how often it is tried.
OPERATIONS: dict[Operation, int] = {
    unary: 8, integer: 2, binary: 8, compare: 3, logic: 1, select: 3, cast: 2, reduction: 6, normalise: 3, view: 10, index: 4,
    scatter: 3, scan: 2, join: 4, mutate: 5, contract: 1, pool: 1, create: 2,
}  # fmt: skip

__all__ = ["F", "Dropped", "Grower", "Operation", "Program", "grow", "is_writable", "kind_of", "runs", "shrunk", "try_line"]
