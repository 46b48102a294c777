"""Writes the host program of a schedule: registers for sizes, slots for buffers, one instruction a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from kgen import errors
from kgen.capture.check_index import check_index
from kgen.host import program as hp
from kgen.host.interpret import Interpreted
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Atom, Expr, Size
from kgen.ir.plan import Call, Launch, Schedule, members, variants
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.rendered.tensor_map import is_pointer, map_rank


@dataclass(slots=True)
class Assembled:
    """A program with the tensors, callables and GPU kernels that it refers to by number."""

    program: hp.Program
    constants: list[torch.Tensor]
    callables: list[Callable[..., Any]]
    launches: list[TritonKernel]


def assemble(
    schedule: Schedule, kernels: Mapping[str, KernelCall], interpret: bool = False, regions: bool = False
) -> Assembled:
    """`kernels` maps the name of each kernel step to what was built for it. `interpret` runs GPU kernels in Triton's
    interpreter, on the CPU's memory. With `regions`, a profiler's timeline has each kernel, with what it is of."""
    return _Assembler(schedule, kernels, interpret, regions).run()


# Library calls that take their result's memory from the plan.
_OUT_VARIANTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default")


# Calls that raise an error where their first argument is false.
_CHECKS = (check_index, torch.ops.aten._assert_scalar.default)


class _Assembler:
    def __init__(self, schedule: Schedule, kernels: Mapping[str, KernelCall], interpret: bool, regions: bool) -> None:
        self.schedule, self.graph = schedule, schedule.graph
        self.calls = kernels
        self.interpret, self.regions = interpret, regions
        self.roots: dict[str, str] = {}  # buffer -> the one that owns its memory, as far as asked for
        self.aligned, self.written = self._demands_on_memory()
        self.registers = Registers(self.graph.derived)
        self.code: list[hp.Instruction] = []
        self.slots: list[hp.SlotSpec] = []
        self.slot_of: dict[str, int] = {}
        self.constants: list[torch.Tensor] = []
        self.constant_slots: list[tuple[int, int]] = []
        self.callables: list[Callable[..., Any]] = []
        self.symbols: list[str] = []
        calls = (step.node for step in schedule.steps if isinstance(step, Call))
        self.library_results = frozenset(out for node in calls for out in node.outs if out is not None)
        self.launches: dict[Any, int] = {}  # by what makes two kernels one
        self.gpu_kernels: list[TritonKernel] = []

    def _demands_on_memory(self) -> tuple[frozenset[str], frozenset[str]]:
        """The buffers whose memory GPU kernels need at multiples of 16 bytes, and those whose memory some step writes."""
        aligned: set[str] = set()
        written: set[str] = set()
        for step in self.schedule.steps:
            if not isinstance(step, Call):
                for call in self._calls(step):
                    if call.launch is not None:
                        aligned.update(_aligned_buffers(call, call.launch))
                written.update(out for s in step.statements for out in s.outs)
            else:
                written.update(new for _, new in step.node.mutates)
        return frozenset(map(self._root, aligned)), frozenset(map(self._root, written))

    def _read(self) -> frozenset[str]:
        """The buffers that a step or the caller gets to see, and those whose memory they are in."""
        found = {o.buffer for o in self.graph.outputs if isinstance(o, ir.TensorArg)}
        for step in self.schedule.steps:
            if isinstance(step, Call):
                found.update(ir.reads(step.node))
            else:
                calls = self._calls(step)
                found.update(name for call in calls for name in (*call.buffers, *(one.buffer for one in call.maps)))
        return frozenset((*found, *map(self._root, found)))

    def _root(self, name: str) -> str:
        """The buffer that owns the memory."""
        return ir.storage_owner(self.graph.buffers, name, self.roots)

    def run(self) -> Assembled:
        inputs = self._inputs()
        for name, tensor in self.graph.constants.items():
            self.constant_slots.append((self._new_slot(name), len(self.constants)))
            tensor = tensor.to(self.graph.buffers[name].device)
            self.constants.append(_aligned(tensor) if name in self.aligned else tensor)
        for step in self.schedule.steps:
            if isinstance(step, Call):
                self._call(step)
            else:
                self._kernel(step)
        outputs = tuple(self._output(o) for o in self.graph.outputs)
        program = hp.Program(
            tuple(inputs), tuple(self.registers.values), tuple(self.slots), tuple(self.code), outputs, tuple(self.symbols),
            tuple(self.registers.computes), tuple(self.constant_slots), tuple(kernel.name for kernel in self.gpu_kernels),
        )  # fmt: skip
        return Assembled(program, self.constants, self.callables, self.gpu_kernels)

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def _inputs(self) -> list[hp.Input]:
        bound = self._bind_symbols()
        read = self._read()
        out: list[hp.Input] = []
        for position, item in enumerate(self.graph.inputs):
            if item.frozen and item.buffer not in read:
                out.append(hp.InputIgnored())  # only what is made of it once is read
            elif item.buffer is not None:
                buffer = self.graph.buffers[item.buffer]
                slot = self._new_slot(item.buffer)
                binds = tuple((reg, what, dim) for reg, where, what, dim in bound if where == position)
                spec = self.slots[slot]
                strides = spec.strides if buffer.strides else None
                flags = item.buffer in self.aligned, item.buffer in self.written
                out.append(hp.InputTensor(slot, buffer.dtype, spec.sizes, strides, binds, *flags))
            elif item.expr is not None:
                first = any(where == position and what == "int" for _, where, what, _ in bound)
                out.append(hp.InputInt(self.registers.of(item.expr), check=not first))
            else:
                out.append(hp.InputIgnored())
        return out

    def _bind_symbols(self) -> list[tuple[int, int, str, int]]:
        """Where each size symbol comes from: an integer argument if there is one, else a size, else a stride."""
        bound: list[tuple[int, int, str, int]] = []
        known = self.registers.known
        for whole in (False, True):
            for expr, position, what, dim in self._numbers_of_inputs():
                symbols = [a.expr() for a in ix.free_atoms(expr) if isinstance(a, Size)]
                # alone, or known only as a whole: a backward may get s0*s1 and neither of them
                new = any(s not in known for s in symbols)
                if new and (expr is symbols[0] or whole) and expr not in known:
                    known[expr] = self.registers.fresh()
                    bound.append((known[expr], position, what, dim))
        return bound

    def _numbers_of_inputs(self) -> Iterator[tuple[Expr, int, str, int]]:
        """(expression, argument, "int", "size" or "stride", dimension), the surest source of a symbol first."""
        inputs = list(enumerate(self.graph.inputs))
        yield from ((item.expr, position, "int", 0) for position, item in inputs if item.expr is not None)
        buffers = [(self.graph.buffers[item.buffer], position) for position, item in inputs if item.buffer is not None]
        for buffer, position in buffers:
            yield from ((expr, position, "size", dim) for dim, expr in enumerate(buffer.sizes))
        for buffer, position in buffers:
            yield from ((expr, position, "stride", dim) for dim, expr in enumerate(buffer.strides or ()))

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _new_slot(self, name: str) -> int:
        buffer = self.graph.buffers[name]
        strides = buffer.strides or ix.contiguous_strides(buffer.sizes)
        spec = hp.SlotSpec(
            buffer.dtype, self._regs(buffer.sizes), self._regs(strides), self._reg(buffer.offset), str(buffer.device)
        )
        self.slots.append(spec)
        self.slot_of[name] = len(self.slots) - 1
        return len(self.slots) - 1

    def _reg(self, expr: Expr | int) -> int:
        return self.registers.of(expr, self.code)

    def _regs(self, exprs: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(self._reg(e) for e in exprs)

    def _slot(self, name: str) -> int:
        """The slot of a buffer that exists, defining aliases on the way."""
        aliases = []
        while name not in self.slot_of:
            base = self.graph.buffers[name].alias_of
            if base is None:
                raise errors.InvalidIR(stage="host", node=name, problem="used before it is made")
            aliases.append(name)
            name = base
        found = self.slot_of[name]
        for alias in reversed(aliases):
            source, found = found, self._new_slot(alias)
            self.code.append(hp.Alias(found, source))
        return found

    def _define(self, name: str) -> int:
        """The slot of a buffer that the next kernel writes."""
        whole = ir.owner(self.graph, name)
        if whole != name:  # its first part makes the whole
            self._define(whole)
        if name in self.slot_of or self.graph.buffers[name].alias_of is not None:
            return self._slot(name)
        source = self.schedule.reuses.get(name)
        slot = self._new_slot(name)
        self.code.append(hp.Alloc(slot) if source is None else hp.Reuse(slot, self.slot_of[source]))
        return slot

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _calls(self, step: Launch) -> list[KernelCall]:
        """What was built for a kernel, by its choices."""
        return [self.calls[one.name] for one in variants(step)]

    def _kernel(self, step: Launch) -> None:
        work, table = _work(step), members(step)[0].by_size
        origin = _origin(step) if self.regions else ""
        items = tuple(self._kernel_call(call, work, origin) for call in self._calls(step))
        if len(set(items)) == 1 or table is None:
            self.code.append(items[0])
            return
        limits = tuple(limit for limit, _ in table.choices if limit is not None)
        self.code.append(hp.Pick(self._reg(table.length), limits, items))

    def _kernel_call(self, call: KernelCall, work: str, origin: str) -> hp.Kernel | hp.Launch | hp.PythonCall:
        if call.launch is not None:
            return self._launch(call, call.launch, origin)
        slots = tuple(self._define(name) for name in call.buffers)
        registers = tuple(map(self._integer, call.sizes))
        if call.symbol not in self.symbols:
            self.symbols.append(call.symbol)
        return hp.Kernel(self.symbols.index(call.symbol), slots, registers, work, origin)

    def _launch(self, call: KernelCall, kernel: TritonKernel, origin: str) -> hp.Launch | hp.PythonCall:
        slots, registers = self._parameters(call, kernel)
        grid, names = self._regs(call.grid), tuple(item.buffer for item in call.maps)
        if self.interpret:
            self.callables.append(Interpreted(kernel, names))
            tensors = tuple(map(hp.ArgTensor, slots))
            return hp.PythonCall(len(self.callables) - 1, (*tensors, *map(hp.ArgInt, (*registers, *grid))))
        number = self.launches.setdefault(kernel.identity, len(self.launches))
        if number == len(self.gpu_kernels):
            self.gpu_kernels.append(kernel)
        return hp.Launch(number, slots, registers, grid, names, origin)

    def _parameters(self, call: KernelCall, kernel: TritonKernel) -> tuple[hp.Regs, hp.Regs]:
        """The slots and the registers in the order of the kernel's signature."""
        slots: list[int] = []
        registers: list[int] = []
        buffers, sizes, maps = iter(call.buffers), iter(call.sizes), iter(call.maps)
        for kind in kernel.signature:
            if is_pointer(kind):
                slots += map(self._define, islice(buffers, 1))
            elif map_rank(kind):
                item = next(maps, None)
                if item is None or item.type != kind:
                    raise errors.InvalidProgram(
                        where=f"kernel {kernel.name}", rule=f"gets a descriptor of type {kind}, not {item}"
                    )
                slots.append(self._define(item.buffer))
                registers += self._regs(item.numbers)
            else:
                registers += map(self._integer, islice(sizes, 1))
        rest = (*buffers, *sizes, *maps)
        if rest:
            raise errors.InvalidProgram(
                where=f"kernel {kernel.name}", rule=f"has parameters for all it is given, not for {rest}"
            )
        return tuple(slots), tuple(registers)

    def _integer(self, given: str | int) -> int:
        return self.registers.literal(given) if isinstance(given, int) else self._symbol(given)

    def _symbol(self, name: str) -> int:
        for symbol in self.graph.derived:
            if symbol.name == name:
                return self._reg(symbol.expr())
        for expr, reg in self.registers.known.items():
            atom = expr.atom()
            if isinstance(atom, Size) and atom.name == name:
                return reg
        raise errors.InvalidIR(stage="host", node=name, problem="a size that no input and no call defines")

    def _call(self, step: Call) -> None:
        node = step.node
        args = tuple(self._arg(a) for a in node.args)
        kwargs = tuple((k, self._arg(v)) for k, v in node.kwargs)
        if node.target in _CHECKS and isinstance(node.args[0], Expr):
            self.code.append(hp.Check(self._reg(node.args[0]), str(node.args[1]), node.target is check_index))
            return
        if str(node.target) in _OUT_VARIANTS and node.outs[0] is not None:
            self._out_variant(node, args, kwargs)
            return
        self._declare_late(node)
        code, self.code = self.code, []  # what depends on the results' sizes runs after they are bound
        outs = tuple(None if name is None else self._new_slot(name) for name in node.outs)
        after, self.code = self.code, code
        numbers = tuple((position, self.registers.known[s.expr()]) for s, position, dim in node.binds if dim < 0)
        made = zip(node.outs, outs, strict=True)
        aligned = tuple(slot for name, slot in made if slot is not None and name in self.aligned)
        if isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            self.code.append(hp.Extern(schema.name, schema.overload_name, args, kwargs, outs, numbers, aligned))
        else:
            self.callables.append(node.target)
            self.code.append(hp.PythonCall(len(self.callables) - 1, args, kwargs, outs, numbers, aligned))
        for symbol, position, dim in node.binds:
            slot = outs[position]
            if dim >= 0 and slot is not None:
                self.code.append(hp.BindSize(self.registers.known[symbol.expr()], slot, dim))
        self.code.extend(after)
        for _, new in node.mutates:
            self._slot(new)

    def _declare_late(self, node: ir.Extern) -> None:
        """Registers for the size symbols that the call's results define."""
        found = [symbol for symbol, _, _ in node.binds]
        for name in node.outs:
            if name is not None:
                buffer = self.graph.buffers[name]
                atoms = [a for e in (*buffer.sizes, *(buffer.strides or ())) for a in ix.free_atoms(e)]
                found += [a for a in atoms if isinstance(a, Size) and a not in self.graph.derived]
        for symbol in found:
            if symbol.expr() not in self.registers.known:
                reg = self.registers.known[symbol.expr()] = self.registers.fresh()
                self.registers.late.add(reg)

    def _out_variant(self, node: ir.Extern, args: tuple[hp.Arg, ...], kwargs: tuple[tuple[str, hp.Arg], ...]) -> None:
        name = node.outs[0]
        assert name is not None
        slot = self._define(name)
        self.code.append(hp.Extern(node.target._schema.name, "out", args, (*kwargs, ("out", hp.ArgTensor(slot))), (None,)))

    # ---- arguments and results --------------------------------------------------------------------------------------

    def _arg(self, tree: Any) -> hp.Arg:
        if isinstance(tree, ir.TensorArg):
            slot, geometry = self._view(tree)
            return hp.ArgTensor(slot, *geometry)
        if isinstance(tree, Expr):
            return hp.ArgInt(self._reg(tree))
        if isinstance(tree, ir.Number):
            return hp.ArgInt(self._reg(tree.expr), tree.kind)
        if isinstance(tree, list | tuple):
            return hp.ArgList(tuple(self._arg(t) for t in tree))
        return hp.ArgConst(tree)

    def _view(self, arg: ir.TensorArg) -> tuple[int, tuple[Any, ...]]:
        """A slot and the view's geometry on it; empty when it is the whole buffer in its own layout."""
        buffer = self.graph.buffers[arg.buffer]
        slot = self._slot(arg.buffer)
        if self._is_whole(arg, buffer):
            return slot, ()
        assert buffer.strides is not None
        linear = ix.linearize(arg.index, buffer.strides, buffer.offset)
        strides, offset = [], linear
        for v in arg.vars:
            stride = ix.stride_of(linear, v)
            assert stride is not None
            strides.append(stride)
            offset = offset - stride * v.expr()
        extents = [v.extent for v in arg.vars]
        return slot, (self._regs(extents), self._regs(_as_in_eager(extents, strides)), self._reg(offset), arg.dtype)

    def _is_whole(self, arg: ir.TensorArg, buffer: ir.Buffer) -> bool:
        same = tuple(v.extent for v in arg.vars) == buffer.sizes and arg.dtype == buffer.dtype
        return same and all(e is v.expr() for e, v in zip(arg.index, arg.vars, strict=True))

    def _output(self, item: Any) -> hp.Output:
        if isinstance(item, ir.TensorArg):
            slot, geometry = self._view(item)
            if not geometry and (planned := self._as_planned(item.buffer)):
                return replace(hp.OutTensor(slot, *planned), exact=True)
            return hp.OutTensor(slot, *geometry)
        if isinstance(item, Expr):
            return hp.OutInt(self._reg(item))
        if isinstance(item, ir.Number):
            return hp.OutInt(self._reg(item.expr), item.kind)
        if isinstance(item, ir.ArgumentMultiple):
            return hp.OutArgument(item.position, item.factor)
        return hp.OutConst(item)

    def _as_planned(self, name: str) -> tuple[Any, ...]:
        """The geometry of a whole, contiguous result that a library makes: dimensions of length 1 may have other strides there,
        as those of filters have where the image's channels are last. A vector stays as it is: its length may not even be what
        tracing says, as of what a sum of bags in bfloat16 saves for its gradient."""
        buffer = self.graph.buffers[name]
        if name not in self.library_results or len(buffer.sizes) < 2 or all(size != 1 for size in buffer.sizes):
            return ()
        if buffer.strides is None or tuple(buffer.strides) != ix.contiguous_strides(buffer.sizes):
            return ()
        return self._regs(buffer.sizes), self._regs(buffer.strides), self._reg(ix.as_expr(buffer.offset)), buffer.dtype


def _as_in_eager(extents: Sequence[Expr], strides: Sequence[Expr]) -> list[Expr]:
    """The strides; those of dimensions of length 1, which no address depends on, are what contiguous tensors have there: DDP
    compares gradients' strides with parameters', and people read them."""
    found, following = list[Expr](), ix.ONE
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        found.append(following if extent == 1 else stride)
        following = found[-1] * extent
    return found[::-1]


def _work(step: Launch) -> str:
    """What a kernel computes, for messages: its operators, then the user's lines."""
    origins = [origin for one in members(step) for origin in one.origins]
    operators = dict.fromkeys(name for origin in origins for name in origin.operators)
    where = dict.fromkeys(origin.line for origin in origins if origin.line)
    return "".join([f", of {', '.join(operators)}" * bool(operators), *(f"\n  {line}" for line in list(where)[:4])])


def _origin(step: Launch) -> str:
    """What a kernel is of, for a timeline: the modules, four at most, and the first of the user's lines."""
    origins = [origin for one in members(step) for origin in one.origins]
    modules = list(dict.fromkeys(path for origin in origins for path in origin.modules))
    text = f" in {', '.join(modules[:4])}" if modules else ""
    return text + "".join([f" at {origin.line}" for origin in origins if origin.line][:1])


def _aligned_buffers(call: KernelCall, kernel: TritonKernel) -> Iterator[str]:
    """Those whose data a GPU kernel needs at multiples of 16 bytes."""
    flags = (must for kind, must in zip(kernel.signature, kernel.divisible, strict=True) if is_pointer(kind))
    yield from (name for name, must in zip(call.buffers, flags, strict=False) if must)
    yield from (item.buffer for item in call.maps)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose data begins at a multiple of 16 bytes."""
    if tensor.data_ptr() % 16 == 0:
        return tensor
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.size(), tensor.stride())


# ---- registers --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Registers:
    """Says which register holds which size. An expression is computed once: before the code where its sizes are known by then.
    `derived` defines the size symbols that are functions of others, `late` are the registers that code defines."""

    derived: Mapping[Size, Expr]
    values: list[int] = field(default_factory=list)
    known: dict[Expr, int] = field(default_factory=dict)
    computes: list[hp.Compute] = field(default_factory=list)
    late: set[int] = field(default_factory=set)

    def fresh(self, value: int = 0) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def literal(self, value: int) -> int:
        expr = ix.constant(value)
        if expr not in self.known:
            self.known[expr] = self.fresh(value)
        return self.known[expr]

    def of(self, expr: Expr | int, code: list[hp.Instruction] | None = None) -> int:
        expr = ix.as_expr(expr)
        found = self.known.get(expr)
        if found is not None:
            return found
        literal = expr.as_int()
        if literal is not None:
            return self.literal(literal)
        made = self._compute(expr, code)
        self.known[expr] = made
        return made

    def _compute(self, expr: Expr, code: list[hp.Instruction] | None) -> int:
        total: int | None = None
        for mono, coef in expr.terms:
            term: int | None = self.literal(coef) if coef != 1 or not mono else None
            for atom in mono:
                factor = self._atom(atom, code)
                term = factor if term is None else self._emit("mul", (term, factor), code)
            assert term is not None
            total = term if total is None else self._emit("add", (total, term), code)
        assert total is not None
        return total

    def _atom(self, atom: Atom, code: list[hp.Instruction] | None) -> int:
        expr = atom.expr()
        if expr in self.known:
            return self.known[expr]
        if isinstance(atom, ix.FloorDiv | ix.Mod):
            made = self._emit(
                "floordiv" if isinstance(atom, ix.FloorDiv) else "mod", (self.of(atom.num, code), self.of(atom.den, code)), code
            )
        elif isinstance(atom, ix.Apply):
            args = tuple(self.of(a, code) for a in atom.args)
            made = self._emit(atom.fn, args if len(args) > 1 else args * 2, code)
        elif isinstance(atom, Size) and atom in self.derived:
            made = self.of(self.derived[atom], code)
        else:
            raise errors.InvalidIR(stage="host", node=str(atom), problem="a size that no input and no call defines")
        self.known[expr] = made
        return made

    def _emit(self, op: str, args: tuple[int, ...], code: list[hp.Instruction] | None) -> int:
        dst = self.fresh()
        item = hp.Compute(dst, op, *args)
        if code is not None and any(a in self.late for a in args):
            self.late.add(dst)
            code.append(item)
        else:
            self.computes.append(item)
        return dst
