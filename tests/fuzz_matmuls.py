"""Random programs around matmuls: prologues of their operands, consumers of their results, matmuls that share an
operand or read each other's results. `check` runs one with its matmuls left to one template, in a random configuration,
against eager in float64.

    python -m tests.fuzz_matmuls --device cuda --count 300 --seconds 200

runs them natively on a GPU, prints what fails, and says so by its exit status.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

sys.path.insert(0, str(Path(__file__).parent))  # for `python -m tests.fuzz_matmuls`
from codegen import copied, gradients, near
from fuzz_graphs import (
    PRELUDE,
    Dropped,
    Grower,
    Operation,
    Program,
    binary,
    is_writable,
    kind_of,
    normalise,
    reduction,
    runs,
    shrunk,
    try_line,
    unary,
    view,
)
from op_table import TOLERANCE

from kgen.backend import kgen_backend
from kgen.errors import KernelSpills, KernelTooLarge
from kgen.ir.plan import Kernel
from kgen.only import only
from kgen.report.record import EagerRecord, Recorder, recording
from kgen.templates.contract import Config

GPU_TEMPLATES = (
    "triton_matmul", "triton_matmul_tiles", "triton_matmul_b_resident", "triton_matmul", "triton_matmul_persistent",
    "triton_matvec", "triton_matmul_sliced_k",
)  # fmt: skip
# Triton's interpreter does not run Gluon.
NATIVE_TEMPLATES = (
    *GPU_TEMPLATES,
    "triton_matmul_warp_specialized",
    "triton_matmul_warp_specialized",
    "triton_matmul_full_row",
)
CPU_TEMPLATES = ("cpp_matmul",)
MOST = 20000
# What multiplies no float32 numbers exactly, and rows for what takes few.
IN_HALVES = ("triton_matmul_warp_specialized", "triton_matmul_sliced_k", "triton_matmul_full_row")
FEW = (1, 2, 5, 8, 13, 16, 17, 31, 32)
# TMA wants rows that begin at multiples of 16 bytes.
COPIED = ("triton_matmul_tiles", "triton_matmul_persistent", "triton_matmul_warp_specialized", "triton_matmul_full_row")
ANY_SIZE = (1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 31, 32, 33, 48, 61, 64, 67, 96, 101, 128, 131)
EVEN_SIZE = (8, 16, 24, 32, 48, 64, 72, 96, 128, 136)
NAME = re.compile(r"\b[vx]\d+\b")
MATMUL = re.compile(r" @ |mm\(|linear\(|einsum\(|mv\(")
FLOATS = re.compile(r"torch\.(float32|bfloat16|float16)\b")
DTYPES = {torch.float32: 5, torch.bfloat16: 3, torch.float16: 2, torch.float64: 1}


@dataclass
class _Grower(Grower):
    """`copied`: operands are mostly as TMA wants them."""

    copied: bool = False


# ---- inputs -----------------------------------------------------------------------------------------------------------


def given(g: _Grower, dims: Sequence[str], kind: str = "float", scale: float = 1.0) -> str:
    """A new input over dimensions that are names of sizes or numbers: "float", "other" (of another float type), "bool",
    "bytes", or "index N" (below N)."""
    name, order, suffix = f"x{len(g.inputs)}", list(dims), ""
    shape, rank = ", ".join(dims), len(dims)
    layout = g.rng.choices(
        ["plain", "turned", "stepped", "offset", "shifted", "padded", "expanded"], [40 if g.copied else 9, 3, 1, 1, 1, 1, 1]
    )[0]
    if layout == "turned" and rank > 1:
        order, suffix = [*dims[:-2], dims[-1], dims[-2]], ".mT"
    elif layout == "stepped" and rank:
        order[-1], suffix = f"2 * {dims[-1]}", "[..., ::2]"
    elif layout == "offset" and rank:
        order[0], suffix = f"{dims[0]} + 1", "[1:]"
    elif layout == "shifted" and rank:
        order[-1], suffix = f"{dims[-1]} + 1", "[..., 1:]"
    elif layout == "padded" and rank:
        order[-1], suffix = f"{dims[-1]} + 3", "[..., :-3]"
    elif layout == "expanded" and rank > 1:
        at = g.rng.randrange(rank)
        order[at], suffix = "1", f".expand({shape})"
    drawn = ", ".join(order)
    other = torch.float32 if g.dtype.itemsize < 4 else torch.float16
    made = {
        "float": f"(randn({drawn}) * {scale}).to({g.dtype})", "other": f"(randn({drawn}) * {scale}).to({other})",
        "bool": f"(randn({drawn}) > 0)", "bytes": f"(randint(200, {drawn}) - 100).to(torch.int8)",
    }  # fmt: skip
    expr = made[kind] if kind in made else f"randint({kind.removeprefix('index ')}, {drawn})"
    g.inputs.append((name, expr + suffix))
    g.env[name] = g.space[name] = eval(expr + suffix, g.space)
    if kind == "float" and is_writable(g.env[name]):
        g.owned.add(name)
    return name


def label(g: _Grower, size: int) -> str:
    """The name of a size, if it has one."""
    return next((name for name in "mknhb" if g.space[name] == size), str(size))


def dims_of(g: _Grower, t: torch.Tensor) -> list[str]:
    return [label(g, n) for n in t.shape]


def value_of(g: _Grower, expression: str) -> torch.Tensor:
    found = eval(expression, g.space)
    assert isinstance(found, torch.Tensor)
    return found


# ---- operands -------------------------------------------------------------------------------------------------------


def changed(g: _Grower, a: str) -> str:
    """What a prologue makes of an operand: its last two dimensions may become longer or shorter."""
    t = g.env[a]
    rows, depth = dims_of(g, t)[-2:]
    forms: list[Callable[[], str]] = [
        lambda: f"({a} * {g.number()})", lambda: f"torch.relu({a})", lambda: f"torch.tanh({a} + {g.number()})",
        lambda: f"({a} * {given(g, [depth])})", lambda: f"({a} * {given(g, [rows, '1'])} + 1)",
        lambda: f"({a} + {given(g, [rows, depth])})", lambda: f"F.pad({a}, (1, 2))", lambda: f"F.pad({a}, (0, 3, 2, 1))",
        lambda: f"{a}[..., {given(g, [g.rng.choice(('m', 'n', '5'))], f'index {rows}')}, :]",
        lambda: f"{a}.index_select(-1, {given(g, ['k'], f'index {depth}')})",
        lambda: f"F.rms_norm({a}, {a}.shape[-1:], {given(g, [depth])}, 0.1)",
        lambda: f"F.layer_norm({a}, {a}.shape[-1:], eps=0.1)", lambda: f"{a}.softmax(-1)",
        lambda: f"torch.where({given(g, [rows, depth], 'bool')}, {a}, 0)", lambda: f"{a}[..., 1:]", lambda: f"{a}[..., ::2, :]",
        lambda: f"{a}.flip(-1)", lambda: f"torch.cat([{a}, {a} * 0.5], -1)", lambda: f"torch.cat([{a}, {a}.relu()], -2)",
        lambda: f"F.silu({a}[..., : {a}.shape[-1] // 2]) * {a}[..., -({a}.shape[-1] // 2) :]",
        lambda: f"{a}.to({torch.float32 if g.dtype.itemsize < 4 else torch.float16}).to({g.dtype})", lambda: f"{a}.tril()",
        lambda: f"{a}.roll(1, -1)", lambda: f"{a}.cumsum(-1) * 0.1",
    ]  # fmt: skip
    return f"({g.rng.choice(forms)()})"


def weight(g: _Grower, dims: Sequence[str]) -> str:
    """A second operand of that shape: plain, computed, or dequantised. `dims` end with depth and columns."""
    depth, columns = dims[-2:]
    scale = 0.2
    if g.rng.random() < (0.8 if g.copied else 0.55):
        return given(g, dims, scale=scale)
    forms: list[Callable[[], str]] = [
        lambda: f"{given(g, [*dims[:-2], columns, depth], scale=scale)}.mT",
        lambda: f"{given(g, dims, 'bytes')}.to({g.dtype}) * 0.01",
        lambda: f"({given(g, dims, 'bytes')}.to({g.dtype}) * {given(g, [columns], scale=0.02)})",
        lambda: (
            f"({given(g, [*dims[:-2], columns, depth], 'bytes')}.to({g.dtype}) * {given(g, [columns, '1'], scale=0.02)}).mT"
        ),
        lambda: f"{given(g, dims, 'other', scale)}.to({g.dtype})",
        lambda: f"({given(g, dims, scale=scale)} * {given(g, [depth, '1'])})",
        lambda: f"({given(g, dims, scale=scale)} + {given(g, dims, scale=scale)})",
        lambda: f"{given(g, [*dims[:-1], f'{columns} + 5'], scale=scale)}[..., 2:-3]",
        lambda: f"torch.relu({given(g, dims, scale=scale)})",
    ]
    return f"({g.rng.choice(forms)()})"


def left(g: _Grower, rank: int) -> str:
    """The expression of a first operand: a new input or what there is, as it is or computed."""
    rng = g.rng
    found = [n for n, t in g.env.items() if t.dim() == rank and t.dtype == g.dtype]
    lead = ["b"] if rank == 3 else []
    a = rng.choice(found) if found and rng.random() < 0.75 else given(g, [*lead, "m", "k"])
    return changed(g, a) if rng.random() < (0.15 if g.copied else 0.4) else a


# ---- matmuls -------------------------------------------------------------------------------------------------------


def matrices(g: _Grower, name: str) -> str:
    a = left(g, 2)
    rows, depth = dims_of(g, value_of(g, a))
    n = g.rng.choice(("n", "n", "n", "k", "h"))
    forms: list[Callable[[], str]] = [
        lambda: f"{a} @ {weight(g, [depth, n])}", lambda: f"torch.mm({a}, {weight(g, [depth, n])})",
        lambda: f"F.linear({a}, {given(g, [n, depth], scale=0.2)})",
        lambda: f"F.linear({a}, {given(g, [n, depth], scale=0.2)}, {given(g, [n])})",
        lambda: f"torch.addmm({given(g, [n])}, {a}, {weight(g, [depth, n])})",
        lambda: f"torch.addmm({given(g, [rows, n])}, {a}, {weight(g, [depth, n])}, beta={g.number()}, alpha={g.number()})",
        lambda: f"torch.addmm({given(g, [rows, '1'])}, {a}, {weight(g, [depth, n])}, alpha=0.5)",
        lambda: f"{given(g, [n, rows], scale=0.2)} @ {a}",
        lambda: f"torch.einsum('mk,mn->kn', {a}, {given(g, [rows, n], scale=0.2)})",
        lambda: f"torch.einsum('mk,nk->nm', {a}, {given(g, [n, depth], scale=0.2)})",
        lambda: f"({a} @ {a}.mT) * 0.1", lambda: f"torch.mv({a}, {given(g, [depth], scale=0.2)})",
    ]  # fmt: skip
    return f"{name} = {g.rng.choice(forms)()}"


def batches(g: _Grower, name: str) -> str:
    a = left(g, 3)
    b, rows, depth = dims_of(g, value_of(g, a))
    n = g.rng.choice(("n", "n", "k", "h"))
    forms: list[Callable[[], str]] = [
        lambda: f"torch.bmm({a}, {weight(g, [b, depth, n])})", lambda: f"{a} @ {weight(g, [b, depth, n])}",
        lambda: f"{a} @ {weight(g, [depth, n])}", lambda: f"F.linear({a}, {given(g, [n, depth], scale=0.2)}, {given(g, [n])})",
        lambda: f"torch.baddbmm({given(g, [b, rows, n])}, {a}, {weight(g, [b, depth, n])}, beta=0.5, alpha={g.number()})",
        lambda: f"torch.baddbmm({given(g, ['1', n])}, {a}, {weight(g, [b, depth, n])})",
        lambda: f"torch.einsum('bmk,bnk->bmn', {a}, {given(g, [b, n, depth], scale=0.2)})",
        lambda: f"torch.einsum('bmk,kn->bnm', {a}, {weight(g, [depth, n])})",
        lambda: f"torch.einsum('bmk,bmn->kn', {a}, {given(g, [b, rows, n], scale=0.1)})",
        lambda: f"torch.einsum('bmk,hkn->bhmn', {a}, {given(g, ['h', depth, n], scale=0.2)})",
        lambda: f"torch.einsum('bmk,kn->mbn', {a}, {weight(g, [depth, n])})",
        lambda: f"({a} @ {a}.mT).softmax(-1) @ {a}",
        lambda: f"{a} @ {given(g, [b, depth], scale=0.2)}.unsqueeze(-1)",
    ]  # fmt: skip
    return f"{name} = {g.rng.choice(forms)()}"


def horizontal(g: _Grower, name: str) -> str:
    """Two or three matmuls of one operand: joined at once, or apart and finished differently."""
    a = left(g, 2)
    depth = dims_of(g, value_of(g, a))[-1]
    first, second = weight(g, [depth, "n"]), weight(g, [depth, "n"])
    narrow = weight(g, [depth, "h"])
    return f"{name} = " + g.rng.choice(
        (
            f"F.silu({a} @ {first}) * ({a} @ {second})", f"torch.sigmoid({a} @ {first} + 1) - torch.relu({a} @ {second})",
            f"torch.cat([{a} @ {first}, ({a} @ {narrow}) * 0.5, {a} @ {second}], -1)",
            f"({a} @ {first}) + ({a} @ {narrow}).sum(-1, keepdim=True)",
            f"torch.stack([{a} @ {first}, torch.tanh({a} @ {second})])",
            f"({a} @ {first}) @ ({a} @ {second}).mT * 0.1",
        )
    )  # fmt: skip


# ---- consumers ------------------------------------------------------------------------------------------------------


def beside(g: _Grower, name: str) -> str:
    """With an input over the rows, the columns, all, or none of the dimensions."""
    a = g.pick("float", rank=1)
    dims = dims_of(g, g.env[a])
    how = g.rng.choice(("row", "column", "tile", "scalar", "lead"))
    shape = {"row": dims[-1:], "column": [*dims[:-1], "1"], "tile": dims, "scalar": [], "lead": dims[1:]}[how]
    b = given(g, shape, g.rng.choice(("float", "float", "float", "other")))
    return f"{name} = " + g.rng.choice(
        (
            f"{a} + {b}", f"{a} * {b}", f"F.gelu({a} + {b})", f"torch.relu({a}) - {b}",
            f"torch.maximum({a}, {b}.to({a}.dtype))",
            f"torch.where({given(g, shape, 'bool')}, {a}, {b})", f"{a}.masked_fill({given(g, shape, 'bool')}, 0.5)",
            f"torch.lerp({a}, {b}.to({a}.dtype), 0.3)",
        )
    )  # fmt: skip


def cast(g: _Grower, name: str) -> str:
    return f"{name} = {g.pick('float')}.to({g.rng.choice(('torch.float32', str(g.dtype)))})"


def indexed(g: _Grower, name: str) -> str:
    """Extremes that are no ties, and losses."""
    a = g.pick("float", rank=2)
    t, d = g.env[a], g.dim(a)
    if g.rng.random() < 0.4:
        flat = f"{a}.reshape(-1, {a}.shape[-1])"
        target = given(g, [label(g, t.numel() // t.shape[-1])], f"index {label(g, t.shape[-1])}")
        return f"{name} = " + g.rng.choice(
            (
                f"F.cross_entropy({flat}.float(), {target})", f"{flat}.gather(1, {target}[:, None])",
                f"F.cross_entropy({flat}.float(), {target}, reduction='none', label_smoothing=0.1)",
            )
        )  # fmt: skip
    best = t.double().topk(2, d)[0] if t.shape[d] > 1 else None
    if g.dtype.itemsize == 2 or (best is not None and bool((best.diff(dim=d).abs() < 1e-3).any())):
        raise Dropped
    return f"{name} = " + g.rng.choice((f"{a}.argmax({d})", f"{a}.max({d})[1]", f"{a}.max({d}, keepdim=True)[0]"))


def put(g: _Grower, name: str) -> str:
    a = g.pick("float", rank=2)
    t = g.env[a]
    dims = dims_of(g, t)
    rows, rest, indexed = dims[0], dims[1:], given(g, [dims[0]], f"index {dims[0]}")
    base = given(g, [rows, *rest])
    everywhere = f"{indexed}.reshape(-1, {', '.join('1' * len(rest))}).expand({base}.shape)"
    columns, along = given(g, dims[-1:], f"index {dims[-1]}"), given(g, dims, f"index {dims[-1]}")
    return f"{name} = " + g.rng.choice(
        (
            f"{base}.index_add(0, {indexed}, {a}.to({g.dtype}))",
            f"torch.zeros_like({base}).index_add(0, {indexed}, {a}.to({g.dtype}))",
            f"{base}.index_put(({indexed}.argsort(stable=True),), {a}.to({g.dtype}))",
            f"{base}.index_put(({indexed},), {a}.to({g.dtype}), accumulate=True)",
            f"{base}.slice_scatter({a}[1:].to({g.dtype}), 0, 1)", f"{base}.select_scatter({a}[0].to({g.dtype}), 0, 0)",
            f"{a}.index_select(0, {indexed})", f"{a}[{indexed}] * 2",
            f"torch.scatter_add({base}, 0, {everywhere}, {a}.to({g.dtype}))",
            f"{base}.index_add(-1, {columns}, {a}.to({g.dtype}))", f"torch.scatter_add({base}, -1, {along}, {a}.to({g.dtype}))",
            f"{base}.index_copy(-1, {columns}.argsort(stable=True), {a}.to({g.dtype}))",
        )
    )  # fmt: skip


def join(g: _Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    d = g.dim(a)
    same = [n for n, t in g.env.items() if t.shape == g.env[a].shape and kind_of(t) == "float"]
    b = g.rng.choice(same)
    return f"{name} = " + g.rng.choice(
        (
            f"torch.cat([{a}, {b}], {d})", f"torch.stack([{a}, {b}], {d})", f"F.pad({a}, (1, 2))",
            f"F.pad({a}, (-1, 1), value=0.5)", f"torch.cat([{a}.narrow({d}, 0, 1), {a}], {d})",
            f"{a}.tril()", f"{a}.repeat_interleave(2, {d})",
        )
    )  # fmt: skip


def heads(g: _Grower, name: str) -> str:
    """As attention takes its projections apart."""
    a = g.pick("float", rank=2)
    t = g.env[a]
    parts = g.rng.choice([p for p in (2, 3, 4, 8) if t.shape[-1] % p == 0 and t.shape[-1]] or [1])
    apart = f"{a}.unflatten(-1, ({parts}, -1))"
    return f"{name} = " + g.rng.choice(
        (
            f"{apart}.movedim(-2, 0)", f"{apart}.transpose(-2, -3).contiguous()", f"{a}.chunk({parts}, -1)[-1]",
            f"{apart}.sum(-1)", f"{a}.unflatten(-1, (-1, {parts})).amax(-1)", f"{apart}.square().mean(-1, keepdim=True)",
            f"{a}.mT.contiguous()", f"{a}.mT.reshape({a}.shape)",
            f"{a}[..., : {a}.shape[-1] // 2] * {a}[..., {a}.shape[-1] - {a}.shape[-1] // 2 :]",
        )
    )  # fmt: skip


def mutate(g: _Grower, name: str) -> str:
    """Writes into an input, before or after it is read, or into a copy."""
    if g.owned and g.rng.random() < 0.7:
        a = g.rng.choice(sorted(g.owned))
        t = g.env[a]
        same = [n for n, u in g.env.items() if u.shape == t.shape and kind_of(u) == "float" and n != a]
        b = g.rng.choice(same) if same else "0.5"
        return g.rng.choice(
            (f"{a}.add_({b})", f"{a}.mul_(0.5)", f"{a}[0] = 0.5", f"{a}.copy_({b} * 1)", f"{a}[..., 1:].tanh_()")
        )
    a = g.pick("float", rank=1)
    return f"{name} = {a}.clone()\n" + g.rng.choice(
        (f"{name}.mul_(0.5)", f"{name}[..., 0] = 0.25", f"{name}[1:].add_({a}[1:])")
    )


MATMULS: dict[Operation, int] = {matrices: 5, batches: 3, horizontal: 2}
#: What follows the first matmul, and how often it is tried.
OPERATIONS: dict[Operation, int] = {
    matrices: 2, batches: 1, horizontal: 1, beside: 6, unary: 4, binary: 3, cast: 1, indexed: 2, put: 2, join: 2,
    heads: 3, mutate: 2, reduction: 4, normalise: 2, view: 3,
}  # fmt: skip


def grow(seed: int, template: str) -> Program:
    """The program of a seed, with sizes that suit the template: always the same one."""
    rng = random.Random(f"{seed} {template}")
    weights = dict(DTYPES)
    if template != "cpp_matmul":
        weights.pop(torch.float64)
    if template in IN_HALVES:
        weights[torch.float32] = 1
    dtype = rng.choices(list(weights), list(weights.values()))[0]
    g = _Grower(seed, rng, dtype, most=MOST, copied=template in COPIED)
    sizes = _sizes(rng, template)
    exec(PRELUDE.format(seed=seed), g.space)
    g.space |= sizes
    while not try_line(g, MATMULS):
        pass
    wanted = len(g.lines) + rng.choice((0, 1, 1, 2, 2, 3, 4))
    for _ in range(40 * wanted):
        if len(g.lines) < wanted:
            try_line(g, OPERATIONS)
    made = [n for n in g.env if n.startswith("v")]
    outputs = made[-2:] if rng.random() < 0.4 else made[-1:]
    outputs += [n for n in made if n not in outputs and rng.random() < 0.25]
    program = Program(seed, tuple(g.inputs), tuple(g.lines), tuple(outputs), tuple(sizes.items()))
    return needed(program if MATMUL.search(needed(program).source()) else replace(program, outputs=(*outputs, made[0])))


def needed(program: Program) -> Program:
    """Without the lines and inputs that no output depends on."""
    alive, lines = set(program.outputs), []
    for line in reversed(program.lines):
        names = set(NAME.findall(line))
        if line.split(" = ")[0] in alive or not line.startswith("v"):  # others write to inputs
            alive |= names
            lines.append(line)
    inputs = tuple((name, expr) for name, expr in program.inputs if name in alive)
    return replace(program, inputs=inputs, lines=tuple(reversed(lines)))


def _sizes(rng: random.Random, template: str) -> dict[str, int]:
    lengths = EVEN_SIZE if template in COPIED and rng.random() < 0.9 else ANY_SIZE
    found = {name: rng.choice(lengths) for name in "mkn"} | {"h": rng.choice((4, 8, 16)), "b": rng.choice((1, 2, 3))}
    if template == "triton_matvec":
        found["m"] = 1
    elif template == "triton_matmul_sliced_k":
        found["m"] = rng.choice(FEW)
    elif rng.random() < 0.1:
        found[rng.choice("mkn")] = rng.choice((0, 1, 1))
    return found


# ---- running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class How:
    """How a program is run: by which template, where, with symbolic sizes, with gradients."""

    template: str
    device: str = "cpu"
    dynamic: bool = False
    backward: bool = False

    def pick(self, seed: int) -> Callable[[Sequence[Config]], Config]:
        """Any configuration; the smaller ones more often, so that small matmuls have several tiles."""
        rng = random.Random(seed)

        def choose(configs: Sequence[Config]) -> Config:
            smallest = sorted(configs, key=lambda c: c.get("BLOCK_M", 1) * c.get("BLOCK_N", 1))
            return smallest[0] if rng.random() < 0.5 else rng.choice(smallest)

        return choose


@dataclass(frozen=True)
class Outcome:
    """What is wrong, if anything is, and how many kernels were the template's."""

    error: str = ""
    taken: int = 0


def check(program: Program, how: How) -> Outcome:
    f, args = program.load()
    with recording() as recorder:
        try:
            _compare(f, [_moved(a, how.device) for a in args], program, how)
        except BackendCompilerFailed as cause:
            unusable = isinstance(cause.inner_exception, KernelSpills | KernelTooLarge)  # a configuration that nobody runs
            return Outcome("" if unusable else f"{type(cause).__name__}: {str(cause).strip()[:1500]}")
        except Exception as cause:  # whatever it is, it is this program's failure
            return Outcome(f"{type(cause).__name__}: {str(cause).strip()[:1500]}")
    return Outcome("", _taken(recorder, how.template))


def _moved(t: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor elsewhere, in the same layout."""
    memory = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return memory.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def _compare(f: Callable[..., Any], args: list[torch.Tensor], program: Program, how: How) -> None:
    options = {"cache": False, "poison": True, "gpu_interpreter": how.template != "cpp_matmul" and how.device == "cpu"}
    exact = _widened(program)
    if how.backward and not _has_gradients(exact, args):
        how = replace(how, backward=False)
    agrees = near(gradients(exact) if how.backward else exact, _tolerance(program))
    with only(how.template, how.pick(program.seed)):
        compiled = torch.compile(_own(f), backend=partial(kgen_backend, options=options), dynamic=how.dynamic)
        for sample in (args, *_others(program, how)):
            ours, theirs = copied(sample), copied(sample)
            got, want = _called(compiled, ours, how.backward), _called(f, theirs, how.backward)
            agrees(sample, [got, *ours], [want, *theirs])


def _has_gradients(f: Callable[..., Any], args: Sequence[torch.Tensor]) -> bool:
    """Whether eager has: of what it saves, nothing may be written over. Without casts that can be an argument."""
    try:
        gradients(f)(*(a.double() if a.is_floating_point() else a for a in copied(args)))
    except RuntimeError as cause:
        return "modified by an inplace operation" not in str(cause)
    return True


def _widened(program: Program) -> Callable[..., Any]:
    """The function for arguments of float64, without casts to anything coarser."""
    lines = (FLOATS.sub("torch.float64", line).replace(".float()", ".double()") for line in program.lines)
    return replace(program, lines=tuple(lines)).load()[0]


def _called(f: Callable[..., Any], args: Sequence[torch.Tensor], backward: bool) -> Any:
    if backward:
        return gradients(f)(*args)
    with torch.no_grad():
        return f(*args)


def _own(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: Dynamo must not find what it compiled for another program."""
    return types.FunctionType(f.__code__.replace(), f.__globals__, f.__name__)


def _others(program: Program, how: How) -> Iterator[list[torch.Tensor]]:
    """Arguments of other sizes for a graph of symbolic ones, where the program allows it."""
    if how.dynamic:
        other = replace(
            program, sizes=tuple((name, size + 9 if name == "m" and size > 1 else size) for name, size in program.sizes)
        )
        if runs(other):
            yield [_moved(a, how.device) for a in other.load()[1]]


def _tolerance(program: Program) -> float:
    """A rounding in the middle makes errors of its size in results of any type."""
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return TOLERANCE[next((kind for kind in kinds if str(kind) in program.source()), torch.float64)]


def _taken(recorder: Recorder, template: str) -> int:
    plans = [graph.plan for graph in recorder.graphs if not isinstance(graph, EagerRecord)]
    kernels = (step for plan in plans for step in plan.steps if isinstance(step, Kernel))
    return sum(kernel.choice is not None and kernel.choice.template == template for kernel in kernels)


def how_of(seed: int, device: str, templates: Sequence[str]) -> How:
    """One of the templates; a part with symbolic sizes, another part with gradients."""
    kind = random.Random(-seed).random()
    return How(templates[seed % len(templates)], device, dynamic=kind < 0.15, backward=kind > 0.88)


def has_gradients(program: Program) -> bool:
    f, args = program.load()
    try:
        gradients(f)(*args)
    except RuntimeError:
        return False
    return ".unfold(" not in program.source()


def run(seed: int, device: str, templates: Sequence[str]) -> tuple[Program, How, Outcome]:
    """Grows and runs the program of a seed; on a GPU, where it takes a moment, by the first template, too, if its own takes no
    matmul of it: templates in Gluon are particular."""
    how = how_of(seed, device, templates)
    program = grow(seed, how.template)
    if how.backward and not has_gradients(program):
        how = replace(how, backward=False)
    outcome = check(program, how)
    if device != "cpu" and outcome == Outcome():
        how = replace(how, template=templates[0])
        outcome = check(program, how)
    torch._dynamo.reset()
    return program, how, outcome


def smaller(program: Program, how: How) -> Program:
    """The failing program without what the failure does not need."""
    return needed(_shrunk(program, how))


def _shrunk(program: Program, how: How) -> Program:
    return shrunk(program, lambda p: (not how.backward or has_gradients(p)) and bool(check(p, how).error))


def report(program: Program, how: How, outcome: Outcome) -> str:
    return f"seed {program.seed}, {how}: {outcome.error}\n\n{program.source()}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs random programs around matmuls by each template.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--templates", nargs="*", help="instead of all for the device (on the CPU: also Triton's, interpreted)")
    parser.add_argument("--verbose", action="store_true", help="a line for each program")
    parser.add_argument("--shrink", action="store_true", help="make failing programs smaller")
    asked = parser.parse_args()
    templates = asked.templates or (NATIVE_TEMPLATES if asked.device != "cpu" else CPU_TEMPLATES + GPU_TEMPLATES)
    start, failed, taken, done = time.monotonic(), [], 0, 0
    for seed in range(asked.first, asked.first + asked.count):
        if time.monotonic() - start > asked.seconds:
            break
        began = time.monotonic()
        program, how, outcome = run(seed, asked.device, templates)
        if asked.verbose:
            print(
                f"{seed} {how.template} {time.monotonic() - began:.1f}s taken {outcome.taken} {outcome.error[:60]}", flush=True
            )
        done, taken = done + 1, taken + bool(outcome.taken)
        if outcome.error:
            failed.append(seed)
            if asked.shrink:
                program = smaller(program, how)
                outcome = check(program, how)
            print(report(program, how, outcome), flush=True)
    print(f"{done} programs, {taken} with matmuls by their template, {len(failed)} failed: {failed}")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
