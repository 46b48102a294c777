"""Every scalar operation, on every dtype it admits, becomes vector instructions: read off the assembly of rendered kernels.

The kernels go through the scheduler and the templates and are compiled for AVX-512 with the flags of `kgen.build`, and with a
switch under which the headers leave a mark wherever they take a vector apart. What may be taken apart is `LANE_BY_LANE`, with
its reason. Nothing is run, so any x86 compiler will do.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen import copied, elementwise_rows

from kgen.build import cpp, toolchain
from kgen.build.toolchain import REGISTER_BYTES
from kgen.build.unit import PRELUDE
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import members
from kgen.ir.values import Value
from kgen.scheduler import choose_loops, schedule
from tests.kernels import plans
from tests.rendering import cpp_text

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="reads x86 assembly"),
]

SIZE = 4096
PER_UNIT = 30
CPU = torch.device("cpu")

_SPECIAL = (
    "erfinv digamma i0 i0e i1 i1e ndtri log_ndtr erfcx bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0"
    " modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1"
    " spherical_bessel_j0 airy_ai igamma igammac zeta polygamma asinh acosh"
)
_POLYNOMIALS = {name for name in ops.OPS if "_polynomial_" in name}
# What goes lane by lane, and why.
LANE_BY_LANE: dict[str, set[str]] = {
    "special functions of torch whose only code is scalar, with branches and tables": set(_SPECIAL.split()),
    "orthogonal polynomials: recurrences whose length differs between lanes": _POLYNOMIALS,
}


def names(op: str, dtype: torch.dtype) -> str:
    return f"{op}_{str(dtype).removeprefix('torch.')}"


def kernel(symbol: str, inputs: tuple[torch.dtype, ...], compute: Callable[..., Value]) -> str:
    """The text of the kernel that applies `compute` to one element of each input. It has a vector loop."""
    i = ix.var("i", SIZE)
    sizes = (ix.constant(SIZE),)
    graph = ir.Graph("test")
    for number, dtype in enumerate(inputs):
        name = f"in{number}"
        graph.buffers[name] = ir.Buffer(name, dtype, CPU, sizes, ix.contiguous_strides(sizes), kind="input")
        graph.inputs.append(ir.GraphInput(name))
    loads = [vs.load(f"in{n}", (i.expr(),), ops.compute_dtype(d)) for n, d in enumerate(inputs)]
    value = compute(*loads)
    graph.buffers["out"] = ir.Buffer("out", value.dtype, CPU, sizes, ix.contiguous_strides(sizes))
    graph.nodes = [ir.Pointwise("out", (i,), value)]
    graph.outputs = [ir.TensorArg("out", (i,), (i.expr(),), value.dtype)]
    plan = schedule(graph)
    (made,) = plan.kernels
    nest = choose_loops(made, plan.graph, Sizes({}), REGISTER_BYTES["avx512"])
    assert nest.vector is not None, f"{symbol} has no vector loop"
    return cpp_text(nest, plan.graph, symbol)


def scalar_operations() -> Iterator[tuple[str, str]]:
    for op, row in ops.OPS.items():
        for dtype in ops.admitted(row.admits):
            inputs = (torch.bool, dtype, dtype) if op == "where" else (dtype,) * row.arity
            yield names(op, dtype), kernel(f"k_{names(op, dtype)}", inputs, lambda *args, op=op: vs.call(op, *args))


def structural_operations() -> Iterator[tuple[str, str]]:
    """Casts between all compute dtypes, rounding to and loads of the narrow floats, random numbers."""
    for source in ops.COMPUTE_DTYPES:
        for target in ops.COMPUTE_DTYPES:
            if source is not target:
                name = f"cast_{names('', source)}{names('', target)}"
                yield name, kernel(f"k_{name}", (source,), lambda x, target=target: vs.cast(x, target))
    for narrow in ops.NARROW_FLOATS:
        name = names("widen", narrow)
        yield name, kernel(f"k_{name}", (narrow,), lambda x: vs.call("neg", x))
    for kind in ("rand", "randn", "randbits"):
        yield kind, kernel(f"k_{kind}", (torch.int64,), lambda x, kind=kind: vs.random(kind, vs.const(7, torch.int64), x))


def assembly(texts: list[str], folder: Path) -> str:
    source, made = folder / "kernels.cpp", folder / "kernels.s"
    source.write_text(PRELUDE + "\n".join(texts), encoding="utf-8")
    flags = [*toolchain.kernel_flags(), "-DKGEN_MARK_LANES", f"-I{cpp.kernel_include_dir()}"]
    header = cpp.precompiled_header(cpp.kernel_include_dir() / "kgen" / "kernel.h", flags)  # once for all of the file
    use = [] if header is None else cpp._use_header(header)
    subprocess.run([*toolchain.compiler().command, "-S", *flags, *use, str(source), "-o", str(made)], check=True)
    return made.read_text(encoding="utf-8")


def functions(text: str) -> dict[str, str]:
    """Symbol -> instructions, those of a kernel's lambdas and threads (`_ZZ5k_addENKUlllE_clEll`) joined to its own."""
    found: dict[str, str] = {}
    for symbol, body in re.findall(r"^(\w[\w.]*):\n(.*?)^\t\.size\t\1, ", text, re.MULTILINE | re.DOTALL):
        nested = re.search(r"(\d+)(k_\w+)", symbol)
        kernel = nested[2][: int(nested[1])] if nested else symbol
        found[kernel] = found.get(kernel, "") + body
    return found


def loops(body: str) -> str:
    """The instructions between a label and a jump back to it."""
    lines = body.splitlines()
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.startswith(".L") and line.endswith(":")}
    inside: set[int] = set()
    for number, line in enumerate(lines):
        jump = re.match(r"\tj\w+\t(\.L\w+)$", line)
        if jump and labels.get(jump[1], number) < number:
            inside.update(range(labels[jump[1]], number + 1))
    return "\n".join(lines[number] for number in sorted(inside))


# Packed arithmetic, on mask registers too, or a call of a function on vectors.
_PACKED = re.compile(
    r"^\tv(?!mov|broadcast|pbroadcast|zero|extract|insert|pextr|pinsr)\w+\t.*%[xyz]mm|^\tk(?!mov)\w+\t|\tcall\tkgen_avx512_v_",
    re.MULTILINE,
)
_MOVED = re.compile(r"^\tvmovdq[au]\d*\t.*%[yz]mm", re.MULTILINE)
# Operations that change no bit: vectors are loaded and stored.
_INTEGERS = ops.admitted(ops.INTEGER)
_MOVES = {names("abs", d) for d in _INTEGERS if not d.is_signed} | {
    f"cast_{names('', a)}{names('', b)}" for a in _INTEGERS for b in _INTEGERS if a.itemsize == b.itemsize
}
# Marks of the headers and calls on scalars, anywhere; in loops, also how the compiler itself takes vectors apart.
_MARKED = re.compile(r"# lane by lane|\tcall\tkgen_avx512_s_\w+")
_SCALAR = re.compile(r"\tvp(?:extr|insr)[bwdq]\t|\tv(?:add|sub|mul|div|min|max|sqrt|fn?m\w+|cvt\w+)s[sd]\t|\tv?ucomis[sd]\t")


def verdict(name: str, body: str) -> str:
    hot = loops(body)
    apart = _MARKED.search(body) or _SCALAR.search(hot)
    if apart:
        return f"goes lane by lane: {apart[0].strip()}"
    return "" if (_MOVED if name in _MOVES else _PACKED).search(hot) else "has no packed arithmetic"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Operation and dtype -> why it is no vector code, empty where it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_ISA", "avx512")
        texts = dict([*scalar_operations(), *structural_operations()])
        groups = [list(texts.values())[k :: -(-len(texts) // PER_UNIT)] for k in range(-(-len(texts) // PER_UNIT))]
        # Not in the threads: of two that ask first, one removes what the other has been given.
        folders = [tmp_path_factory.mktemp("unit") for _ in groups]
        with ThreadPoolExecutor(2) as pool:
            listings = list(pool.map(assembly, groups, folders))
    bodies = {symbol: body for listing in listings for symbol, body in functions(listing).items()}
    return {name: verdict(name, bodies[f"k_{name}"]) for name in texts}


def test_every_operation_and_dtype_is_vector_code(verdicts: dict[str, str]) -> None:
    allowed = {op for group in LANE_BY_LANE.values() for op in group}
    excused = {names(op, dtype) for op in allowed for dtype in ops.admitted(ops.OPS[op].admits)}
    failures = {name: why for name, why in verdicts.items() if why and name not in excused}
    assert not failures, "\n".join(f"{name} {why}" for name, why in failures.items())


def test_what_is_excused_needs_it(verdicts: dict[str, str]) -> None:
    assert len(LANE_BY_LANE) <= 10
    for op in {op for group in LANE_BY_LANE.values() for op in group}:
        assert any(verdicts[names(op, dtype)] for dtype in ops.admitted(ops.OPS[op].admits)), f"{op} is vector code"


# ---- whole kernels


def scaled(tree: Any) -> Any:
    """The arguments with every size above one four times as large."""
    if isinstance(tree, list | tuple):
        return type(tree)(scaled(item) for item in tree)
    return tree.repeat([4 if n > 1 else 1 for n in tree.shape]) if isinstance(tree, torch.Tensor) else tree


@pytest.mark.every(2)
@pytest.mark.parametrize("part", range(2))
def test_no_kernel_is_scalar_as_a_whole(part: int) -> None:
    """The op table on larger inputs: every kernel of at least 64 points has a vector loop, but for scans along one line."""
    scalar, kernels = [], 0
    for row in elementwise_rows([torch.float32])[part::2]:
        args = scaled(list(row.samples[0]))
        try:
            row.fn(*copied(args))
        except (RuntimeError, IndexError, ValueError):
            continue  # this one fixes its sizes
        for plan in plans(row.fn, *args).schedules:
            sizes = Sizes(plan.graph.size_hints)
            for made in (kernel for step in plan.kernels for kernel in members(step)):
                if sizes.points(made.outer) * sizes.points(made.inner) < 64 or any(s.kind == "scan" for s in made.statements):
                    continue
                kernels += 1
                if choose_loops(made, plan.graph, sizes, REGISTER_BYTES["avx512"]).vector is None:
                    scalar.append(f"{row.name}: {made.name}")
    assert kernels > 50
    assert not scalar, "\n".join(scalar)
