"""Small Triton kernels made of the table's texts, and the three ways to run them: interpreted, compiled only, on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from scalar_cases import short, signature
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kgen.ir import ops
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.templates.triton.codegen import interpret
from kgen.templates.triton.codegen.table import (
    NARROW,
    NO_INDEX,
    REDUCE,
    SCAN,
    STRUCTURAL,
    TRITON_OPS,
    TRITON_TYPES,
    WIDEN,
    literal,
    scatter_atomic,
)

HEADER = """import triton
import triton.language as tl

from kgen.templates.triton.device import library as lib


@triton.jit
def kernel({parameters}):
    lane = tl.arange(0, {lanes})
    i = tl.program_id(0) * {lanes} + lane
"""


@dataclass
class Kernel:
    """One kernel in the making: `inputs` and `outputs` are its pointers, by name, in order."""

    name: str
    lanes: int
    inputs: dict[str, torch.dtype] = field(default_factory=dict)
    outputs: dict[str, torch.dtype] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def load(self, dtype: torch.dtype, offsets: str = "i") -> str:
        """A value of its compute dtype."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = dtype
        text = f"tl.load({name} + {offsets})"
        compute = TRITON_TYPES[dtype].compute
        return self.bind(text if compute == TRITON_TYPES[dtype].storage else WIDEN.format(text, type=compute))

    def bind(self, text: str, parts: int = 1) -> str:
        names = [f"t{len(self.lines)}_{k}" for k in range(parts)]
        self.lines.append(f"{', '.join(names)} = {text}")
        return ", ".join(names)

    def store(self, dtype: torch.dtype, value: str, offsets: str = "i") -> None:
        name = f"y{len(self.outputs)}"
        self.outputs[name] = dtype
        self.lines.append(f"tl.store({name} + {offsets}, {value})")

    @property
    def source(self) -> str:
        head = HEADER.format(parameters=", ".join([*self.inputs, *self.outputs]), lanes=self.lanes)
        return head + "".join(f"    {line}\n" for line in self.lines)

    def define(self, folder: Path) -> Any:
        path = folder / f"{self.name}.py"
        path.write_text(self.source)
        spec = importlib.util.spec_from_file_location(self.name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    def compile(self, folder: Path, capability: int) -> str:
        """The PTX."""
        pointers = {name: TRITON_TYPES[dtype].pointer for name, dtype in {**self.inputs, **self.outputs}.items()}
        source = ASTSource(self.define(folder), signature=pointers)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]


Run = Callable[[Kernel, Sequence[torch.Tensor], Sequence[int]], list[torch.Tensor]]


def interpreted(folder: Path) -> Run:
    def run(kernel: Kernel, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        results = [torch.zeros(size, dtype=dtype) for size, dtype in zip(sizes, kernel.outputs.values(), strict=True)]
        with interpret.patched():
            kernel.define(folder)[_grid(kernel, sizes)](*inputs, *results)
        return results

    return run


def on_gpu(folder: Path) -> Run:
    def run(kernel: Kernel, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        results = [
            torch.zeros(size, dtype=dtype, device="cuda") for size, dtype in zip(sizes, kernel.outputs.values(), strict=True)
        ]
        launch = kernel.define(folder)[_grid(kernel, sizes)]
        launch(*(x.cuda() for x in inputs), *results, enable_fp_fusion=False)
        return [result.cpu() for result in results]

    return run


def _grid(kernel: Kernel, sizes: Sequence[int]) -> tuple[int]:
    return (max(1, sizes[0] // kernel.lanes),)


# ---- kernels -----------------------------------------------------------------------------------------------------------


def operations(dtype: torch.dtype) -> tuple[Kernel, list[str]]:
    """Every operation that admits the dtype, on arguments of its own; and their names."""
    kernel = Kernel(f"operations_{short(dtype)}", 128)
    names = [op for op in TRITON_OPS if dtype in ops.admitted(ops.OPS[op].admits)]
    for op in names:
        out, inputs = signature(op, dtype)
        kernel.store(out, kernel.bind(TRITON_OPS[op].format(*(kernel.load(d) for d in inputs))))
    return kernel, names


def casts(source: torch.dtype, targets: Sequence[torch.dtype]) -> Kernel:
    kernel = Kernel(f"casts_{short(source)}", 128)
    for target in targets:
        text = STRUCTURAL["cast"].format(kernel.load(source), type=TRITON_TYPES[target].compute)
        kernel.store(target, kernel.bind(text))
    return kernel


def bitcasts(pairs: Sequence[tuple[torch.dtype, torch.dtype]]) -> Kernel:
    kernel = Kernel("bitcasts", 128)
    for source, target in pairs:
        text = STRUCTURAL["bitcast"].format(kernel.load(source), type=TRITON_TYPES[target].compute)
        kernel.store(target, kernel.bind(text))
    return kernel


def narrow_floats(narrow: torch.dtype) -> Kernel:
    """float32 rounded and kept, float32 stored narrow, and narrow loaded."""
    kernel = Kernel(f"narrow_{short(narrow)}", 128)
    storage = TRITON_TYPES[narrow].storage
    x = kernel.load(torch.float32)
    kernel.store(torch.float32, kernel.bind(STRUCTURAL["round_to"].format(x, type=storage)))
    kernel.store(narrow, kernel.bind(NARROW.format(x, type=storage)))
    kernel.store(torch.float32, kernel.load(narrow))
    return kernel


def literals(dtype: torch.dtype, numbers: Sequence[Any]) -> Kernel:
    """One lane for each number; the lanes left over hold the first."""
    kernel = Kernel(f"literals_{short(dtype)}", 32)
    x = literal(numbers[0], dtype)
    for k, number in enumerate(numbers):
        x = kernel.bind(f"tl.where(i == {k}, {literal(number, dtype)}, {x})")
    kernel.store(dtype, x)
    return kernel


def random_numbers() -> Kernel:
    kernel = Kernel("random_numbers", 128)
    seed, counter = kernel.load(torch.int64, "0"), kernel.load(torch.int64)
    for kind, dtype in (("rand", torch.float32), ("randn", torch.float32), ("randbits", torch.int64)):
        kernel.store(dtype, kernel.bind(STRUCTURAL[kind].format(seed, counter)))
    return kernel


def scatter(mode: str, dtype: torch.dtype) -> Kernel:
    """Joins x1[i] into y0[x0[i]] where x0[i] is not negative."""
    kernel = Kernel(f"scatter_{mode}_{short(dtype)}", 128, outputs={"y0": dtype})
    place = kernel.load(torch.int64)
    kernel.inputs["x1"] = dtype
    text = scatter_atomic(mode, dtype)
    assert text is not None
    kernel.lines.append(text.format(f"y0 + {place}", "tl.load(x1 + i)", f"{place} >= 0"))
    return kernel


ROWS, TILE, COLUMNS = 8, 32, 90  # three tiles, of which the last is not full


def reduction(op: str, dtype: torch.dtype) -> Kernel:
    """The rows of [ROWS, COLUMNS]: two tiles in one state, the third in another, then both joined and folded."""
    kernel = Kernel(f"{op}_{short(dtype)}", ROWS * TILE)
    kind, rule = TRITON_TYPES[dtype].compute, REDUCE[op]
    start = [f"tl.full([{ROWS}, {TILE}], {literal(ops.identity(op, dtype), dtype)}, {kind})"]
    if op in ("argmax", "argmin"):
        start.append(f"tl.full([{ROWS}, {TILE}], {NO_INDEX}, tl.int64)")
    if op == "welford":
        start *= 3
    kernel.inputs["x0"] = dtype
    kernel.lines += [f"row = tl.arange(0, {ROWS})[:, None]", f"column = tl.arange(0, {TILE})[None, :].to(tl.int64)"]
    states = []
    for tiles in ((0, 1), (2,)):
        names = [kernel.bind(text) for text in start]
        for tile in tiles:
            at = kernel.bind(f"column + {tile * TILE} + row * 0")
            real = kernel.bind(f"{at} < {COLUMNS}")
            x = kernel.bind(
                f"tl.load(x0 + row * {COLUMNS} + {at}, mask={real}, other={0 if dtype is not torch.bool else False})"
            )
            more = [at] if op in ("argmax", "argmin") else []
            stepped = kernel.bind(rule.step.format(*names, x, *more), len(names)).split(", ")
            names = [kernel.bind(f"tl.where({real}, {new}, {old})") for new, old in zip(stepped, names, strict=True)]
        states.append(names)
    joined = kernel.bind(rule.combine.format(*states[0], *states[1]), len(start)).split(", ")
    folded = kernel.bind(rule.across.format(*joined, axis=1), len(start)).split(", ")
    results = (dtype, torch.int64) if op in ("argmax", "argmin") else (dtype,) * ops.REDUCTIONS[op].outputs
    for result, value in zip(results, folded, strict=False):
        kernel.store(result, value, f"tl.arange(0, {ROWS})")
    return kernel


def scan(op: str, dtype: torch.dtype) -> Kernel:
    """The rows of [ROWS, 2 * TILE]: the first tile alone, the second after the state at the first one's end."""
    kernel = Kernel(f"scan_{op}_{short(dtype)}", ROWS * TILE)
    rule, parts = SCAN[op], 2 if op in ("argmax", "argmin") else 1
    kernel.inputs["x0"] = dtype
    results = (dtype, torch.int64)[:parts]
    kernel.inputs.update({f"carry{k}": result for k, result in enumerate(results)})
    kernel.lines += [f"row = tl.arange(0, {ROWS})[:, None]", f"column = tl.arange(0, {TILE})[None, :].to(tl.int64)"]
    for tile in range(2):
        at = kernel.bind(f"column + {tile * TILE} + row * 0")
        state = [kernel.bind(f"tl.load(x0 + row * {2 * TILE} + {at})"), at][:parts]
        along = kernel.bind(rule.along.format(*state, axis=1), parts).split(", ")
        if tile == 1:
            carry = [kernel.bind(f"tl.load(carry{k} + row)") for k in range(parts)]
            along = kernel.bind(rule.combine.format(*carry, *along), parts).split(", ")
        for result, value in zip(results, along, strict=True):
            kernel.store(result, value, f"row * {TILE} + column")
    return kernel


def sort(op: str, dtype: torch.dtype, low: int = TILE.bit_length() - 1, lanes: int = 0) -> Kernel:
    """The rows of [ROWS, TILE], under a guess of which bits of indices are registers and lanes."""
    kernel = Kernel(f"{op}_{short(dtype)}_{low}_{lanes}", ROWS * TILE)
    kernel.inputs["x0"] = dtype
    kernel.lines += [f"row = tl.arange(0, {ROWS})[:, None]", f"column = tl.arange(0, {TILE})[None, :].to(tl.int64)"]
    parts = 2 if op in ops.WITH_POSITIONS else 1
    state = [kernel.bind(f"tl.load(x0 + row * {TILE} + column)"), kernel.bind("column + row * 0")][:parts]
    bits = f"{TILE.bit_length() - 1}, {low}, {lanes}"
    found = kernel.bind(SCAN[op].along.format(*state, axis=1, bits=bits), parts).split(", ")
    for result, value in zip((dtype, torch.int64)[:parts], found, strict=True):
        kernel.store(result, value, f"row * {TILE} + column")
    return kernel


def every_kernel(dtype: torch.dtype) -> Iterator[Kernel]:
    yield operations(dtype)[0]
    yield casts(dtype, ops.COMPUTE_DTYPES)
    for op, row in ops.REDUCTIONS.items():
        if dtype in ops.admitted(row.admits):
            yield reduction(op, dtype)
    for op in ops.SCANS:
        if scans(op, dtype):
            yield scan(op, dtype)
    yield from (sort(op, dtype, *bits) for op in ops.ROW_ORDERS if sorts(dtype) for bits in BITS)


# Bits of indices that are registers below lanes, and those that are lanes.
BITS = [(TILE.bit_length() - 1, 0), (1, 2)]


def sorts(dtype: torch.dtype) -> bool:
    """Whether rows have such keys."""
    return dtype in (torch.int32, torch.int64)


def scans(op: str, dtype: torch.dtype) -> bool:
    return op not in ops.ROW_ORDERS and dtype is not torch.bool and (op != "logaddexp" or dtype.is_floating_point)


def ptx_of(kernel: TritonKernel, folder: Path, capability: int) -> str:
    """The PTX of a generated kernel, as kgen/build/triton_worker.py compiles it."""
    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, kernel.name)
    attributes = {(k,): [["tt.divisibility", 16]] for k, multiple in enumerate(kernel.divisible) if multiple}
    signature = dict(zip(function.arg_names, kernel.signature, strict=True))
    source = ASTSource(function, signature, constexprs={}, attrs=attributes)
    options = {**dict(kernel.options), "num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
