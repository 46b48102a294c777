"""Writes `output_code.py`: the host program of a compiled graph as calls of `standalone.Script`, one line a step."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kgen.build import toolchain
from kgen.host import program as hp
from kgen.host.native import with_frees
from kgen.host.poison import without_poison
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Indirect, Size, Sizes
from kgen.ir.plan import Call, Launch, variants
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.rendered.tensor_map import is_pointer, map_rank
from kgen.report import traffic
from kgen.report.record import Record

__all__ = ["script_text"]

# What a script imports or defines: no buffer may be called so.
_RESERVED = ("p", "torch", "device", "inf", "nan", "Script", "View")


def script_text(record: Record, reference: str) -> str:
    """The script; `reference` says what its check compares with."""
    writer = _Writer(record)
    moved = traffic.bytes_moved(record.plan)
    lines = [
        *_header(record, reference),
        "from math import inf, nan", "", "import torch", "from torch import device", "",
        "from kgen.report.standalone import Script, View", "",
        f"p = Script({writer.device!r})" if writer.device != "cpu" else "p = Script()",
        *writer.lines(), "",
        'if __name__ == "__main__":',
        f"    p.run(__file__, moved={moved})",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _header(record: Record, reference: str) -> list[str]:
    plan, info = record.plan, record.info
    on_gpu = any(call.launch is not None for call in record.units.calls.values())
    nodes: list[ir.Origin] = [o for k in plan.kernels for o in k.origins] + [c.node.origin for c in plan.calls]
    operators = dict.fromkeys(op for origin in nodes for op in origin.operators)
    sources = dict.fromkeys(origin.line for origin in nodes if origin.line)
    machine = f"torch {torch.__version__}, {toolchain.isa().name}"
    text = [
        f'"""{info.role} graph {info.name}: {len(plan.kernels)} kernels, {len(plan.calls)} library calls ({machine}).', "",
        "Operators:", *(f"    {op}" for op in operators), "",
        "Source:", *(f"    {line}" for line in sources), "",
        "Run this file: it builds the kernels beside it, draws random inputs, checks the results against",
        f"{reference}, and times a call.",
        *(["Without a GPU its kernels run in Triton's interpreter, and nothing is timed."] if on_gpu else []),
        '"""', "",
    ]  # fmt: skip
    return [line.replace("\\", "\\\\").replace('"""', "'''") if 0 < k < len(text) - 2 else line for k, line in enumerate(text)]


# The instructions that stand for a step of the schedule.
_STEPS = (hp.Kernel, hp.Launch, hp.Extern, hp.PythonCall, hp.Pick)


class _Writer:
    """Names registers and slots, then writes instructions in order."""

    def __init__(self, record: Record) -> None:
        self.plan, self.graph = record.plan, record.plan.graph
        self.calls = record.units.calls
        self.objects = tuple(dict.fromkeys(text for unit in record.units.sources for text in unit.objects))
        program = record.blueprint.program
        self.program = without_poison(program) if record.config.poison else program
        self.device = next((spec.device for spec in self.program.slots if spec.device != "cpu"), "cpu")
        self.taken: set[str] = set(_RESERVED)
        self.symbols = self._symbols()
        self.registers = {reg: self.fresh(name) for reg, name in self._register_names().items()}
        self.slots = {slot: self.fresh(name) for slot, name in self._slot_names().items()}
        self.steps = iter(self.plan.steps)
        self.gpu_kernels: dict[str, str] = {}

    def fresh(self, stem: str) -> str:
        name = stem = "".join(c if c.isalnum() else "_" for c in stem)
        count = 1
        while name in self.taken or keyword.iskeyword(name) or not name.isidentifier():
            count += 1
            name = f"{stem if stem[:1].isalpha() else 'b' + stem}_{count}"
        self.taken.add(name)
        return name

    # ---- names ----------------------------------------------------------------------------------------------------------

    def _symbols(self) -> dict[int, Size]:
        """The size symbols that inputs bind, by register."""
        found: dict[int, Size] = {}
        for item, declared in zip(self.program.inputs, self.graph.inputs, strict=True):
            if isinstance(item, hp.InputInt) and declared.symbol is not None:
                found[item.reg] = declared.symbol
            if isinstance(item, hp.InputTensor) and declared.buffer is not None:
                buffer = self.graph.buffers[declared.buffer]
                for reg, what, dim in item.binds:
                    atom = (buffer.sizes if what == "size" else buffer.strides or ())[dim].atom()
                    if isinstance(atom, Size):
                        found[reg] = atom
        return found

    def _register_names(self) -> dict[int, str]:
        """Registers that something writes; all others are literals."""
        written = {reg: symbol.name for reg, symbol in self.symbols.items()}
        for item in (*self.program.computes, *self.program.code):
            if isinstance(item, hp.Compute):
                written.setdefault(item.dst, f"r{item.dst}")
            elif isinstance(item, hp.BindSize):
                written.setdefault(item.reg, f"u{item.reg}")
            elif isinstance(item, hp.Extern | hp.PythonCall):
                for _, reg in item.registers:
                    written.setdefault(reg, f"u{reg}")
        return written

    def _slot_names(self) -> dict[int, str]:
        """Buffer names, found by walking the program beside the schedule that it was made of."""
        named: dict[int, str] = {}
        for item, declared in zip(self.program.inputs, self.graph.inputs, strict=True):
            if isinstance(item, hp.InputTensor) and declared.buffer is not None:
                named[item.slot] = declared.buffer
        for (slot, _), name in zip(self.program.constants, self.graph.constants, strict=True):
            named[slot] = name
        steps = iter(self.plan.steps)
        for instruction in self.program.code:
            if isinstance(instruction, _STEPS):
                for slot, name in self._step_names(instruction, next(steps)):
                    named.setdefault(slot, name)
        for slot in range(len(self.program.slots)):
            named.setdefault(slot, f"alias{slot}")
        return named

    def _step_names(self, item: Any, step: Any) -> list[tuple[int, str]]:
        if not isinstance(step, Call):
            first = next(iter(hp.each([item])))
            return list(zip(hp.slots_read(first), _tensors(self.calls[variants(step)[0].name]), strict=True))
        out = dict(item.kwargs).get("out")
        if isinstance(out, hp.ArgTensor) and len(step.node.outs) == 1:
            return [(out.slot, str(step.node.outs[0]))]
        return [(slot, name) for slot, name in zip(item.outs, step.node.outs, strict=False) if slot is not None and name]

    # ---- lines ----------------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        program = self.program
        sizes = Sizes(self.graph.seen_sizes)
        hints = {reg: sizes.of(symbol.expr()) for reg, symbol in self.symbols.items()}
        out = [f"p.objects = {self.objects!r}"] if self.objects else []
        out += self.titled("sizes", (f"{name} = p.symbol({hints.get(reg, 0)})" for reg, name in self.registers.items()))
        out += (f"p.compute({self.compute(item)})" for item in program.computes)
        launches = {c.launch.name: c.launch for c in self.calls.values() if c.launch is not None}
        out += self.titled("GPU kernels", map(self.gpu_kernel, launches.values()))
        out += self.titled("inputs", (self.input(k, item) for k, item in enumerate(program.inputs)))
        constants = (f"{self.slots[slot]} = p.constant({k}, {self.geometry(slot)})" for slot, k in program.constants)
        out += self.titled("constants", constants)
        out += self.titled("steps", (self.instruction(item) for item in with_frees(program)))
        return out + self.titled("outputs", map(self.output, program.outputs))

    def titled(self, title: str, lines: Iterable[str]) -> list[str]:
        found = list(lines)
        return ["", f"# ---- {title}", *found] if found else []

    def input(self, position: int, item: hp.Input) -> str:
        if isinstance(item, hp.InputInt):
            return f"p.integer({self.number(item.reg)}{', check=True' if item.check else ''})"
        if not isinstance(item, hp.InputTensor):
            return "p.ignored()"
        binds = ", ".join(f"({self.registers[reg]}, {what!r}, {dim})" for reg, what, dim in item.binds)
        more = f", binds=({binds},)" if binds else ""
        if not (item.dtype.is_floating_point or item.dtype.is_complex or item.dtype is torch.bool):
            high = _index_bound(self.graph, self.graph.inputs[position].buffer)
            more += "" if high is None else f", high={high}"
        line = f"{self.slots[item.slot]} = p.input({self.geometry(item.slot, item)}{more})"
        return line if item.strides is not None or not item.sizes else f'{line}\np.why_not = "input {position} has no strides"'

    def geometry(self, slot: int, given: hp.InputTensor | None = None) -> str:
        spec = self.program.slots[slot]
        strides = spec.strides if given is None or given.strides is not None else ()
        text = f"{spec.dtype}, {self.numbers(spec.sizes)}, {self.numbers(strides)}"
        offset = self.number(spec.offset)
        text = text if offset == "0" else f"{text}, {offset}"
        return text if spec.device == self.device else f"{text}, device={spec.device!r}"

    def instruction(self, item: hp.Instruction) -> str:
        if isinstance(item, _STEPS):
            step = next(self.steps)
            return self.call(item, step) if isinstance(step, Call) else self.kernel(item, step)
        if isinstance(item, hp.Alloc):
            return f"{self.slots[item.slot]} = p.alloc({self.geometry(item.slot)})"
        if isinstance(item, hp.Reuse | hp.Alias):
            verb = "reuse" if isinstance(item, hp.Reuse) else "alias"
            return f"{self.slots[item.slot]} = p.{verb}({self.slots[item.source]}, {self.geometry(item.slot)})"
        if isinstance(item, hp.Free):
            return f"p.free({self.slots[item.slot]})"
        if isinstance(item, hp.BindSize):
            return f"p.bind({self.registers[item.reg]}, {self.slots[item.slot]}, {item.dim}, {item.what!r})"
        assert isinstance(item, hp.Compute)
        return f"p.compute_here({self.compute(item)})"

    def gpu_kernel(self, kernel: TritonKernel) -> str:
        """A kernel's declaration: its source is in a file, and this is what else decides its machine code."""
        name = self.gpu_kernels[kernel.name] = self.fresh(kernel.name)
        more = "".join(f", {key}={value!r}" for key, value in kernel.options)
        given = f"{kernel.signature!r}, {kernel.divisible!r}, warps={kernel.num_warps}, stages={kernel.num_stages}{more}"
        return f"{name} = p.gpu_kernel({kernel.name!r}, {given})"

    def kernel(self, item: Any, step: Launch) -> str:
        calls = [self.calls[one.name] for one in variants(step)]
        if isinstance(item, hp.Pick):
            pick = _noted(f"with p.pick({self.number(item.register)}, {_tuple([str(n) for n in item.limits])}):", step.origins)
            lines = (self.kernel_call(one, call) for one, call in zip(item.items, calls, strict=True))
            return "\n".join([pick, *(f"    {line}" for line in lines)])
        return _noted(self.kernel_call(item, calls[0]), step.origins)

    def kernel_call(self, item: hp.Kernel | hp.Launch | hp.PythonCall, call: KernelCall) -> str:
        if isinstance(item, hp.Kernel):
            sizes = f", {self.numbers(item.registers)}" if item.registers else ""
            return f'p.kernel("{self.program.kernels[item.index]}", {self.named(item.slots)}{sizes})'
        assert call.launch is not None
        if isinstance(item, hp.Launch):
            slots, registers, grid = item.slots, item.registers, item.grid
        else:  # in the interpreter: tensors, then integers, the last three of them the grid
            slots = tuple(one.slot for one in item.args if isinstance(one, hp.ArgTensor))
            numbers = tuple(one.reg for one in item.args if isinstance(one, hp.ArgInt))
            registers, grid = numbers[:-3], numbers[-3:]
        maps = tuple(one.buffer for one in call.maps)
        more = f", maps={maps!r}" if maps else ""
        name = self.gpu_kernels[call.launch.name]
        return f"p.launch({name}, {self.named(slots)}, {self.numbers(registers)}, grid={self.numbers(grid)}{more})"

    def named(self, slots: Sequence[int]) -> str:
        return _tuple([self.slots[slot] for slot in slots])

    def call(self, item: Any, step: Any) -> str:
        made = [f"{self.slots[slot]} = p.result({self.geometry(slot)})" for slot in item.outs if slot is not None]
        if isinstance(item, hp.PythonCall):
            return "\n".join([*made, f"p.python_call({str(step.node.target)!r})"])
        overload = "" if item.overload in ("", "default") else f".{item.overload}"
        parts = [f'"{item.op}{overload}"', _tuple([self.arg(a) for a in item.args])]
        if item.kwargs:
            parts.append("{" + ", ".join(f"{key!r}: {self.arg(value)}" for key, value in item.kwargs) + "}")
        if any(slot is not None for slot in item.outs):
            parts.append("outs=" + _tuple(["None" if slot is None else self.slots[slot] for slot in item.outs]))
        if item.registers:
            parts.append("integers=" + _tuple([f"({position}, {self.registers[reg]})" for position, reg in item.registers]))
        return "\n".join([*made, _noted(f"p.call({', '.join(parts)})", [step.node.origin])])

    # ---- parts ----------------------------------------------------------------------------------------------------------

    def compute(self, item: hp.Compute) -> str:
        count = 3 if item.op == "select" else 2
        return ", ".join([self.registers[item.dst], repr(item.op), *map(self.number, (item.a, item.b, item.c)[:count])])

    def number(self, reg: int) -> str:
        return self.registers.get(reg) or str(self.program.registers[reg])

    def numbers(self, regs: Iterable[int]) -> str:
        return _tuple([self.number(reg) for reg in regs])

    def arg(self, arg: hp.Arg) -> str:
        if isinstance(arg, hp.ArgTensor):
            return self.view(arg)
        if isinstance(arg, hp.ArgInt):
            return self.typed(arg)
        if isinstance(arg, hp.ArgList):
            return "[" + ", ".join(map(self.arg, arg.items)) + "]"
        return repr(arg.value)

    def view(self, item: hp.ArgTensor | hp.OutTensor) -> str:
        if item.sizes is None:
            return self.slots[item.slot]
        geometry = f"{item.dtype}, {self.numbers(item.sizes)}, {self.numbers(item.strides)}, {self.number(item.offset)}"
        return f"View({self.slots[item.slot]}, {geometry})"

    def output(self, item: hp.Output) -> str:
        if isinstance(item, hp.OutArgument):
            return f"p.output_argument({item.position}, {item.factor})"
        return f"p.output({self.result(item)})"

    def result(self, item: hp.OutTensor | hp.OutInt | hp.OutConst) -> str:
        if isinstance(item, hp.OutTensor):
            return self.view(item)
        return self.typed(item) if isinstance(item, hp.OutInt) else repr(item.value)

    def typed(self, item: hp.ArgInt | hp.OutInt) -> str:
        return self.number(item.reg) if item.kind == "int" else f"{self.number(item.reg)}.as_{item.kind}()"


def _tensors(call: KernelCall) -> list[str]:
    """The buffers of a call in the order of its kernel's parameters, those of TMA descriptors among them."""
    if call.launch is None:
        return list(call.buffers)
    buffers, maps = iter(call.buffers), (one.buffer for one in call.maps)
    kinds = (kind for kind in call.launch.signature if is_pointer(kind) or map_rank(kind))
    return [next(buffers) if is_pointer(kind) else next(maps) for kind in kinds]


def _tuple(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _noted(line: str, origins: Iterable[ir.Origin]) -> str:
    """The line with its operators and the user's first line as a comment."""
    found = list(origins)
    operators = dict.fromkeys(op for o in found for op in o.operators)
    source = next((o.line for o in found if o.line), "")
    note = "  ".join(part for part in (", ".join(operators), source) if part).replace("\n", " ")
    return f"{line}  # {note[:100]}" if note else line


# ---- indices among the inputs -----------------------------------------------------------------------------------------


def _index_bound(graph: ir.Graph, name: str | None) -> int | None:
    """What integers of this input must stay below because they, or what is computed of them, index other buffers; None where
    they index nothing."""
    sizes = Sizes(graph.seen_sizes)
    derived = {name}
    bounds: list[int] = []
    for node in graph.nodes:
        values = vs.topological(ir.roots(node))
        from_input = {v for v in values if v.op == "load" and v.attr[0] in derived}
        if not from_input:
            continue
        stores = node.index if isinstance(node, ir.Scatter) else ()
        atoms = {a for e in (*stores, *(e for v in values for e in vs.index_exprs(v))) for a in ix.free_atoms(e)}
        indirect = [a for a in atoms if isinstance(a, Indirect) and from_input & set(vs.topological([a.value]))]
        bounds += [sizes.of(a.size) for a in indirect]
        derived |= {out for out in ir.outs(node) if not graph.buffers[out].dtype.is_floating_point}
    return min(bounds) if bounds else None
