"""The key under which a matmul's measurements are kept: what it computes and how its data lie, apart from names and numbers.

Sizes stand in the key by axis, and strides only by class: whether neighbours along an axis are neighbours in memory, whether
rows begin at multiples of 16 bytes. So layers of one model share an entry, and a look-up renders nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

from kgen.device import is_rounded, tf32_settings
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr, Size, Sizes, Var
from kgen.ir.plan import Kernel, Launch, Statement, members
from kgen.ir.values import Value
from kgen.scheduler.selection.choose import prepared
from kgen.scheduler.selection.memo import for_form
from kgen.templates.loop_contract import LoopProblem
from kgen.tuning.entry import Key

# Bytes at whose multiples rows begin for the fastest loads.
ALIGNED = 16
ROLES = ("b", "m", "n", "o", "k")


def keys_of(
    step: Launch, graph: ir.Graph, device: str, numerics: str, hints: Sequence[Mapping[Size, int]] = ({},)
) -> list[Key]:
    """The keys, at different sizes, of a kernel whose main loop is a matmul, or of several such; `device` is the name of the
    machine that it runs on."""
    described = [_described(kernel, graph) for kernel in members(step)]
    digest = hashlib.sha256(repr([d.form for d in described]).encode()).hexdigest()[:24]
    suffixes = [""] if len(described) == 1 else [str(k) for k in range(len(described))]
    extents = {f"{axis}{k}": e for d, k in zip(described, suffixes, strict=True) for axis, e in d.extents.items()}
    dynamic = tuple(axis for axis, extent in extents.items() if extent.as_int() is None)
    keys = []
    for more in hints:
        at = Sizes({**graph.size_hints, **more})
        lengths = {axis: bucket(at.of(extent)) if axis in dynamic else at.of(extent) for axis, extent in extents.items()}
        keys.append(Key(device, digest, tuple(lengths.items()), dynamic, numerics, _title(step, described[0], lengths)))
    return keys


def _described(kernel: Kernel, graph: ir.Graph) -> _Description:
    """The same for all kernels that are equal but for names, as those of equal layers are."""
    settings = ("described for tuning", *tf32_settings())
    return for_form(settings, [kernel], graph, lambda: _Description(prepared(kernel, graph), graph))


def bucket(length: int) -> int:
    """The power of two that stands for a length of a dynamic axis."""
    return 1 << max(0, length - 1).bit_length()


def _title(step: Launch, described: _Description, sizes: dict[str, int]) -> str:
    names = [op.split(".")[1] if "." in op else op for origin in step.origins for op in origin.operators]
    kinds = " x ".join(str(kind).removeprefix("torch.") for kind in described.main.operands)
    return f"{', '.join(dict.fromkeys(names))}: {kinds}, {' '.join(f'{axis}={n}' for axis, n in sizes.items())}"


def key_of_loops(problem: LoopProblem, template: str, device: str, numerics: str) -> Key | None:
    """The key of a loop kernel, as the scheduler cuts it into loops or tiles, for a template. None where sizes are symbols."""
    [kernel] = problem.kernels
    described = _LoopDescription(kernel, problem.graph)
    lengths = {axis: extent.as_int() for axis, extent in described.extents.items()}
    known = {axis: length for axis, length in lengths.items() if length is not None}
    if len(known) < len(lengths):
        return None
    form = (template, problem.kind, sorted(problem.proposed.items()), problem.exact, described.form)
    digest = hashlib.sha256(repr(form).encode()).hexdigest()[:24]
    kinds = dict.fromkeys(str(problem.graph.buffers[out].dtype) for s in kernel.statements for out in s.outs if any(s.stored))
    names = [op.split(".")[1] if "." in op else op for origin in problem.origins for op in origin.operators]
    types = " ".join(kind.removeprefix("torch.") for kind in kinds)
    sizes = " ".join(f"{axis}={length}" for axis, length in known.items())
    return Key(device, digest, tuple(known.items()), (), numerics, f"{', '.join(dict.fromkeys(names))}: {types}, {sizes}")


class _Form:
    """A kernel without names of buffers and loops: what stands in the form is equal for kernels that share measurements. `role`
    is the axis of each loop."""

    def __init__(self, kernel: Kernel, graph: ir.Graph, role: dict[Var, str]) -> None:
        self.graph, self.role = graph, role
        loops = (*kernel.outer, *kernel.inner)
        self.of_role = {role: [v for v in loops if self.role[v] == role] for role in dict.fromkeys(self.role.values())}
        self.extents = {role: ix.product(v.extent for v in own) for role, own in sorted(self.of_role.items()) if own}
        self.slots: dict[str, int] = {}
        self.numbers: dict[Value, int] = {}
        self.rows: list[Hashable] = []
        self.statements = tuple(self._statement(s) for s in kernel.statements)

    def _statement(self, s: Statement) -> Hashable:
        outs = tuple(self.slots.setdefault(out, len(self.slots)) for out in s.outs)
        kinds = tuple(str(self.graph.buffers[out].dtype) for out in s.outs)
        stores = tuple(self._classes(e, self.graph.buffers[s.outs[0]].dtype) for e in s.store) if any(s.stored) else ()
        values = tuple(self._number(v) for v in (s.value, *s.factors, *([] if s.mask is None else [s.mask])))
        rounded = tuple(map(str, s.operands))
        form = (s.kind, s.op, outs, kinds, s.stored, stores, values, s.mask is None, rounded, repr(s.arguments))
        return (*form, s.unscaled) if any(s.unscaled) else form  # the library needs another kernel

    def _number(self, root: Value) -> int:
        """Arguments first, from left to right: the order in which values were made depends on what was compiled before."""
        todo = [root]
        while todo:
            value = todo[-1]
            missing = [a for a in reversed(value.args) if a not in self.numbers]
            if missing and value not in self.numbers:
                todo += missing
                continue
            todo.pop()
            if value not in self.numbers:
                arguments = tuple(self.numbers[a] for a in value.args)
                self.rows.append((value.op, str(value.dtype), arguments, self._attribute(value)))
                self.numbers[value] = len(self.numbers)
        return self.numbers[root]

    def _attribute(self, value: Value) -> Hashable:
        if value.op == "load":
            name, index, kind = value.attr
            return self.slots.setdefault(name, len(self.slots)), tuple(self._classes(e, kind) for e in index)
        if value.op == "index":
            return tuple(sorted({self.role.get(v, "?") for v in value.variables()}))
        return repr(value.attr)

    def _classes(self, expr: Expr, kind: torch.dtype) -> Hashable:
        """How an offset grows along each axis, loop by loop."""
        found = []
        for role, loops in sorted(self.of_role.items()):
            classes = [self._class(ix.stride_of(expr, v), kind) for v in loops]
            if any(c != "0" for c in classes):
                found.append((role, "".join(classes)))
        return tuple(found)

    def _class(self, stride: Expr | None, kind: torch.dtype) -> str:
        if stride is None:
            return "x"
        if not stride.terms:
            return "0"
        if stride == 1:
            return "1"
        unknown = any(isinstance(a, Size) for a in ix.free_atoms(stride))
        return "a" if ix.mod(stride * kind.itemsize, ALIGNED) == 0 else "s" if unknown else "u"


class _Description(_Form):
    """A kernel whose main loop is a contraction. `form` is equal for kernels that share measurements."""

    def __init__(self, kernel: Kernel, graph: ir.Graph) -> None:
        self.main = next(s for s in kernel.statements if s.kind == "contraction")
        super().__init__(kernel, graph, self._roles(kernel))
        windows = ir.reads_windows(graph, self.main.outs[0])
        allowed = is_rounded(torch.float32, windows) if torch.float32 in self.main.operands else None
        self.form = (tuple(self.rows), self.statements, allowed)

    def _roles(self, kernel: Kernel) -> dict[Var, str]:
        """The axis of each loop: of an operator those of its pattern, of a sum of products b, m, n and k."""
        if self.main.axes:
            return {v: next((name for name, e in self.main.axes if v in ix.free_atoms(e)), "o") for v in self._loops(kernel)}
        left, right = (v.variables() for v in (self.main.value, self.main.factors[0]))
        axis_roles = {(True, True): "b", (True, False): "m", (False, True): "n", (False, False): "o"}
        roles = {v: axis_roles[v in left, v in right] for v in kernel.outer}
        return roles | dict.fromkeys(kernel.inner, "k")

    def _loops(self, kernel: Kernel) -> Iterable[Var]:
        return (*kernel.outer, *kernel.inner)


class _LoopDescription(_Form):
    """A kernel without a contraction: each of its loops is an axis."""

    def __init__(self, kernel: Kernel, graph: ir.Graph) -> None:
        outer = {v: f"x{number}" for number, v in enumerate(kernel.outer)}
        super().__init__(kernel, graph, outer | {v: f"r{number}" for number, v in enumerate(kernel.inner)})
        share = None if kernel.share is None else str(kernel.share.extent)
        self.form = (tuple(self.rows), self.statements, kernel.sections, len(kernel.rows), share)

    def _statement(self, s: Statement) -> Hashable:
        return super()._statement(s), s.inner, s.section, s.block
