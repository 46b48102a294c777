"""The debug folder (`KGEN_DEBUG=dir` or options={"debug": dir}): what every stage made of each compiled graph, for people.

A graph's folder appears when its compilation starts, and each file as soon as its stage is done, so that a compilation that
fails leaves everything up to there. Folders are numbered in order of compilation; a later run, or another process,
continues the numbering.

    graph_000_forward/
        fx.txt             the aten graph that came in
        ir_lowered.txt     loop IR before fusion
        ir_scheduled.txt   the kernels, and the memory plan
        verdicts.txt       every decision, with what would change it
        kernels.cpp        the generated code; of GPU kernels a file each, k0_relu.py
        output_code.py     the whole graph as a script: builds these, checks and times the graph
        graph.pkl          what it is checked against: the loop IR (or graph.fx: the aten graph)
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from kgen.capture.aot_cache import NotSerializable
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.errors import BadOptionValue
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Call, Kernel, Launch, Schedule, Statement, members
from kgen.ir.printer import dtype_name, print_graph, print_node, print_value
from kgen.report.debug_script import script_text
from kgen.report.record import Record
from kgen.report.standalone import reduce_operator
from kgen.scheduler.analysis.memory import storage_size

__all__ = ["print_step", "write_code", "write_graph", "write_lowered", "write_schedule"]

PRELUDE = re.compile(r"^(#include|using namespace)", re.MULTILINE)


# ---- what the stages call where `debug` names a folder -----------------------------------------------------------------


def write_graph(gm: GraphModule, info: GraphInfo, config: Config) -> None:
    assert config.debug is not None
    text = gm.print_readable(print_output=False)
    _write(_new_folder(Path(config.debug), info), "fx.txt", text.rstrip() + "\n")


def write_lowered(graph: ir.Graph, info: GraphInfo, config: Config) -> None:
    _write(_folder(config, info), "ir_lowered.txt", print_graph(graph))


def write_schedule(plan: Schedule, info: GraphInfo, config: Config) -> None:
    folder = _folder(config, info)
    _write(folder, "ir_scheduled.txt", print_schedule(plan))
    _write(folder, "verdicts.txt", print_verdicts(plan))


def write_code(record: Record, gm: GraphModule) -> None:
    folder = _folder(record.config, record.info)
    if record.units.sources:
        _write(folder, "kernels.cpp", kernels_text([one.source for one in record.units.sources]))
    launches = [call.launch for call in record.units.calls.values() if call.launch is not None]
    for launch in launches:
        _write(folder, f"{launch.name}.py", launch.source)
    kept = _keep_reference(folder, record, gm)
    if record.blueprint.constants:
        torch.save(record.blueprint.constants, folder / "constants.pt")
    _write(folder, "output_code.py", script_text(record, kept))


# ---- folders ----------------------------------------------------------------------------------------------------------

_named: dict[str, Path] = {}  # graph names are unique in a process


def _new_folder(root: Path, info: GraphInfo) -> Path:
    """Makes the folder with the next free number. mkdir decides between processes that ask at the same time. Raises
    BadOptionValue."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = f"give a folder that can be written: {error.strerror}"
        raise BadOptionValue(option="debug", value=str(root), expected=expected) from error
    taken = [int(found[1]) for p in root.iterdir() if (found := re.match(r"graph_(\d+)_", p.name))]
    number = max(taken, default=-1) + 1
    while True:
        folder = root / f"graph_{number:03d}_{info.role}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        _named[info.name] = folder
        return folder


def _folder(config: Config, info: GraphInfo) -> Path:
    assert config.debug is not None
    found = _named.get(info.name)
    return found if found is not None and found.is_dir() else _new_folder(Path(config.debug), info)


def _write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")


# ---- texts ------------------------------------------------------------------------------------------------------------


def kernels_text(units: list[str]) -> str:
    """All units as one: the includes once, then every function."""
    heads = [line for text in units for line in text.splitlines() if PRELUDE.match(line)]
    bodies = ["\n".join(line for line in text.splitlines() if not PRELUDE.match(line)) for text in units]
    return "\n".join([*dict.fromkeys(heads), "", *bodies]) + "\n"


def print_verdicts(plan: Schedule) -> str:
    lines = []
    for verdict in plan.final_verdicts():
        lines.append(str(verdict))
        if verdict.change:
            lines.append(f"    to change it: {verdict.change}")
    return "\n".join(lines) + "\n" if lines else "no decisions\n"


def print_schedule(plan: Schedule) -> str:
    """Steps in order with their statements, then where every buffer lives."""
    lines = [f"schedule of {plan.graph.name}: {len(plan.kernels)} kernels, {len(plan.calls)} library calls"]
    for number, step in enumerate(plan.steps):
        lines.append("")
        if isinstance(step, Call):
            lines.append(f"step {number}: {print_node(step.node, plan.graph)}")
        elif isinstance(step, Kernel):
            lines += _kernel_lines(f"step {number}", step)
        else:
            lines.append(f"step {number}: batch {step.name} of {len(step.members)} kernels")
            for member in step.members:
                lines += _kernel_lines("member", member)
        dead = [name for name in plan.dead_after[number] if name not in plan.local] if plan.dead_after else []
        if dead:
            lines.append(f"  last use of {', '.join(dead)}")
    return "\n".join([*lines, "", *_memory_lines(plan)]) + "\n"


def print_step(step: Launch) -> str:
    """A kernel's loops and statements, or those of all kernels of a batch."""
    return "\n".join(line for one in members(step) for line in _kernel_lines("", one)) + "\n"


def _kernel_lines(title: str, kernel: Kernel) -> list[str]:
    loops = [", ".join(f"{v} < {v.extent}" for v in group) or "-" for group in (kernel.outer, kernel.inner)]
    shape = f"outer {loops[0]} | inner {loops[1]} | sections {kernel.sections}"
    lines = [f"{title}{': ' if title else ''}kernel {kernel.name}  ({shape})"]
    lines += [f"  # {line}" for line in dict.fromkeys(o.line for o in kernel.origins if o.line)]
    if kernel.share is not None:
        lines.append(f"  rows shared among {kernel.share.extent} programs ({kernel.share})")
    if kernel.choice is not None:
        rows = kernel.by_size.rows if kernel.by_size else (("all sizes", str(kernel.choice)),)
        lines += [f"  {when}: {what}" for when, what in rows]
    if kernel.rows:
        lines.append(f"  rows kept in cache: {', '.join(kernel.rows)}")
    for s in kernel.statements:
        lines += _statement_lines(s, kernel)
    return lines


def _statement_lines(s: Statement, kernel: Kernel) -> list[str]:
    place = "before the inner loops" if s.section < 0 else f"section {s.section}" + ("" if s.inner else ", after its loop")
    outs = ", ".join(
        f"{out}[{', '.join(map(str, s.store))}] in {'memory' if stored else 'a row' if out in kernel.rows else 'registers'}"
        for out, stored in zip(s.outs, s.stored, strict=True)
    )
    lines = [f"  {place}: {outs} = {s.kind}{f' {s.op}' if s.op else ''}"]
    for expr in s.store:
        for atom in ix.free_atoms(expr):
            if isinstance(atom, ix.Indirect):
                lines += _value_lines(f"where {atom}", atom.value)
    lines += _value_lines("value", s.value)
    return lines + ([] if s.mask is None else _value_lines("mask", s.mask))


def _value_lines(what: str, value: vs.Value) -> list[str]:
    return [f"    {what}:", *(f"      {line}" for line in print_value(value).splitlines())]


def _memory_lines(plan: Schedule) -> list[str]:
    sizes = Sizes(plan.graph.seen_sizes)
    lines = ["memory"]
    for name, buffer in plan.graph.buffers.items():
        if name in plan.local:
            lines.append(f"  {name}: never in memory")
        elif buffer.alias_of is not None:
            lines.append(f"  {name}: in {buffer.alias_of}")
        else:
            origin = f"takes over {plan.reuses[name]}" if name in plan.reuses else buffer.kind
            shape = f"{dtype_name(buffer.dtype)}[{', '.join(map(str, buffer.sizes))}]"
            lines.append(f"  {name}: {shape}, {_bytes_of(buffer, sizes)}, {origin}")
    return lines


def _bytes_of(buffer: ir.Buffer, sizes: Sizes) -> str:
    """What a buffer takes. A library's own form of a tensor, such as packed weights, has no strides."""
    if buffer.strides is None:
        return "in a form of the library's"
    return f"{sizes.of(storage_size(buffer)) * buffer.dtype.itemsize:,} bytes"


# ---- what the script is checked against -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduce_operator(value)


def _keep_reference(folder: Path, record: Record, gm: GraphModule) -> str:
    """Stores the loop IR, or where that holds something that does not pickle, the aten graph; says which."""
    out = io.BytesIO()
    try:
        _Pickler(out).dump(record.plan.graph)
        (folder / "graph.pkl").write_bytes(out.getvalue())
        return "kgen's evaluator on the loop IR before fusion (graph.pkl)"
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        pass  # a higher-order operator holds functions
    try:
        (folder / "graph.fx").write_bytes(EagerGraph(gm, ()).serialize())
        return "the aten graph run in eager (graph.fx)"
    except NotSerializable:
        return "nothing: the graph cannot be stored"
