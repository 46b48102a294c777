"""Whether each operand tile of a candidate reads just the elements that it should, for the tiles of all programs.

The text of a kernel's slots runs on numpy arrays (`tiles`): an operand's over all of its axes, the ends of the last tiles
included, then the terms are summed, and the result's slot stores them. An access outside of a tensor's elements is an error,
and so is a mask that lets anything through past the end of an axis. Operands are small integers without zeros, so that sums
are exact: one element too many, too few, or of another place makes another result than torch's in float64. No GPU is needed,
and sizes may be those of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kgen import pipeline
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule
from kgen.scheduler.selection.choose import chosen_problem, contraction_of
from kgen.templates import registry
from kgen.templates.contract import Config as Knobs
from kgen.templates.problem import Problem as Task
from kgen.templates.render import clean
from kgen.templates.triton.codegen.slots import Slots

from .candidates import Candidate, CandidateCompiler, Traced, templates
from .computation import Computation
from .problem import Problem
from .tensors import make
from .tiles import Descriptor, Memory, Pointer, Scope, Tile, WrongAccess, memory_of, tile

# Elements of an operand that are worked out at a time, and of one that is checked at all.
AT_ONCE, MOST = 2_000_000, 3e8
# What surrounds a contraction here: what small integers go through exactly, in functions that `tiles` knows.
LEFT = ("", "cast", "relu", "scale", "affine relu", "gather", "pad", "add")
RIGHT = ("", "cast", "scale", "relu")
EPILOGUES = ("", "bias", "relu", "bias relu", "residual", "bias residual relu", "several outputs")


@dataclass(frozen=True)
class Checked:
    """What was found of a candidate; `skipped` says why nothing was tried."""

    candidate: str
    wrong: str = ""
    skipped: str = ""


def simplified(problem: Problem) -> Problem:
    """The problem with only such surroundings as are checked here."""
    keep = {"left": LEFT, "right": RIGHT, "epilogue": EPILOGUES}
    dropped = {name: "" for name, known in keep.items() if getattr(problem, name) not in known}
    return replace(problem, **dropped, family="")


def check(problem: Problem, most: int = 0) -> Iterator[Checked]:
    """Every candidate whose slots have another text than those before; of each template `most`, where that is not 0."""
    computation = Computation(problem)
    generator = torch.Generator().manual_seed(abs(problem.seed))
    flat = [_in_small_integers(make(spec, torch.device("cpu"), generator).tensor, generator) for spec in computation.specs]
    with torch.no_grad():
        traced = Traced(computation.run)
        traced.call(*flat)
        graph = traced.graphs[0]
        wanted = [one.values for one in computation.expected(flat)]
        compiler = CandidateCompiler(graph, interpreted=True)
        seen: set[tuple[str, ...]] = set()
        for template in templates(interpreted=True):
            if not {"A", "B"} <= registry.find(template).operands.keys():  # read in windows, not tile by tile
                continue
            offered = [c for c in compiler.offered(template) if c.parts == 1 and not c.copies]
            for candidate in offered[: most or None]:
                yield from _checked(compiler, candidate, graph.arguments, wanted, seen)
    torch._dynamo.reset()


def _in_small_integers(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype is not torch.int64:
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        tensor.copy_((torch.randint(1, 4, tensor.shape, generator=generator) * signs).to(tensor.dtype))
    return tensor


def _checked(
    compiler: CandidateCompiler,
    candidate: Candidate,
    args: Sequence[Any],
    wanted: Sequence[torch.Tensor],
    seen: set[tuple[str, ...]],
) -> Iterator[Checked]:
    with candidate.within():
        plan = compiler._scheduled()[1]
    steps = plan.steps
    if len(steps) != 1 or not isinstance(steps[0], Kernel) or steps[0].choice is None:
        yield Checked(str(candidate), skipped="its plan has other steps than one kernel of a template")
        return
    options = pipeline.scheduler_options(plan.graph, compiler.config)
    task = chosen_problem(steps[0], plan.graph, options.device(plan.graph, contraction_of(steps[0])))
    if any(s.kind != "pointwise" for s in task.epilogue) or task.operand_reductions:
        yield Checked(str(candidate), skipped="its epilogue is more than points")
        return
    if sum(_points(task, one.axes) for one in task.inputs.values()) > MOST:
        yield Checked(str(candidate), skipped="its operands are too large")
        return
    config = task.template.config(**dict(steps[0].choice.config))
    run = Simulation(task, config, _memories(plan, args))
    if run.text in seen:
        return
    seen.add(run.text)
    try:
        run.run()
        yield Checked(str(candidate), wrong=run.problem(plan, wanted))
    except WrongAccess as cause:
        yield Checked(str(candidate), wrong=str(cause))
    except AttributeError as cause:
        yield Checked(str(candidate), skipped=f"a function is not known here: {cause}")


def _memories(plan: Schedule, args: Sequence[Any]) -> dict[str, Memory]:
    """Inputs as they are, results as fresh memory."""
    found: dict[str, Memory] = {}
    for item, arg in zip(plan.graph.inputs, args, strict=True):
        if item.buffer is not None:
            found[item.buffer] = memory_of(item.buffer, arg)
    sizes = Sizes(plan.graph.size_hints)
    for name, buffer in plan.graph.buffers.items():
        if name not in found and buffer.strides is not None:
            shape, strides = ([sizes.of(e) for e in given] for given in (buffer.sizes, buffer.strides))
            made = torch.empty_strided(shape, strides, dtype=torch.float64)
            found[name] = memory_of(name, made.fill_(float("nan")))
    return found


def _points(task: Task, axes: Sequence[str]) -> float:
    return float(np.prod([task.size(axis) for axis in axes]))


class Simulation:
    """One kernel of a template, slot by slot."""

    def __init__(self, task: Task, config: Knobs, memories: dict[str, Memory]) -> None:
        self.task, self.config, self.memories = task, config, memories
        self.slots = Slots(task, config)
        self.operands = [(name, number) for number, member in enumerate(task.members) for name in member]
        self.lines = {(name, number): self._tile_lines(name, number) for name, number in self.operands}
        self.result = next(iter(task.template.results))
        self.store_lines = self._store_lines()
        self.boxed = {
            key: any(".load([" in line for line in lines) and self._is_boxed(lines) for key, lines in self.lines.items()
        }
        self.text = (
            task.template.name, *(line for lines in self.lines.values() for line in lines), *self.store_lines,
            *(str(found) for found in self.slots.parameters.maps), str(self._blocks() if any(self.boxed.values()) else ""),
        )  # fmt: skip

    # ---- texts ------------------------------------------------------------------------------------------------------

    def _is_boxed(self, lines: Sequence[str]) -> bool:
        return any(f"{name}.load(" in line for name in self.slots.parameters.maps.values() for line in lines)

    def _tile_lines(self, name: str, number: int) -> list[str]:
        operand = self.task.template.operands[name]
        stem = "start_" if operand.access == "tma" else "r"
        return self.slots.tile(name, number, "made", [self._index(stem, axis) for axis in operand.axes])

    def _index(self, stem: str, axis: str) -> str:
        return axis if self.task.template.block(axis) is None else f"{stem}{axis}"

    def _store_lines(self) -> list[str]:
        result = self.task.template.results[self.result]
        stem = "start_" if result.access == "tma" else "r"
        subtile = {} if result.access != "tma" else {a: str(side) for a, side in self._subtile().items() if self._is_cut(a)}
        many = "acc" if result.many else "acc0"
        return self.slots.store(self.result, many, [self._index(stem, axis) for axis in result.axes], **subtile)

    def _subtile(self) -> dict[str, int]:
        axes = [a for a in self.task.template.results[self.result].axes if self.task.template.block(a)]
        return {axis: self.task.side(axis, self.config) for axis in axes}

    def _is_cut(self, axis: str) -> bool:
        return self._subtile()[axis] != self._blocks()[axis]

    def _blocks(self) -> dict[str, int]:
        return {a: self.config.get(block) for a in self.task.template.axes if (block := self.task.template.block(a))}

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All of the kernel, some rows at a time."""
        rows, block = self._padded("m"), self._blocks().get("m", 1)
        step = max(block, AT_ONCE // max(1, self._padded("k")) // block * block)
        for batch in range(self.task.size("b")):
            rights = [self._operand("B", number, batch, {}) for number in range(len(self.task.members))]
            for low in range(0, rows, step):
                left = self._operand("A", 0, batch, {"m": (low, min(rows, low + step))})
                sums = [left @ right for right in rights]
                self._stored([tile(one.T if self._is_turned() else one) for one in sums], batch, low)

    def _padded(self, axis: str) -> int:
        """The length of an axis up to the end of its last tile."""
        block = self._blocks().get(axis, 1)
        return -(-self.task.size(axis) // block) * block

    def _operand(self, name: str, number: int, batch: int, ranges: dict[str, tuple[int, int]]) -> np.ndarray:
        """The operand's tiles side by side, zero past the ends of its axes."""
        axes = [a for a in self.task.template.operands[name].axes if self.task.template.block(a)]
        spans = [ranges.get(axis, (0, self._padded(axis))) for axis in axes]
        if self.boxed[name, number]:
            made = np.zeros([high - low for low, high in spans])
            steps = [range(low, high, self._blocks()[axis]) for axis, (low, high) in zip(axes, spans, strict=True)]
            for starts in itertools.product(*steps):
                part = self._tile(name, number, batch, dict(zip(axes, starts, strict=True)), self._blocks())
                place = tuple(
                    slice(s - low, s - low + self._blocks()[a]) for a, s, (low, _) in zip(axes, starts, spans, strict=True)
                )
                made[place] = part
        else:
            lengths = {axis: high - low for axis, (low, high) in zip(axes, spans, strict=True)}
            made = self._tile(name, number, batch, {a: low for a, (low, _) in zip(axes, spans, strict=True)}, lengths)
        for at, (axis, (low, high)) in enumerate(zip(axes, spans, strict=True)):
            past = np.arange(low, high) >= self.task.size(axis)
            if np.any(np.compress(past, made, axis=at)):
                raise WrongAccess(f"tiles of {name} are not zero past the end of axis {axis}")
        order = [axes.index(axis) for axis in ("m", "k", "n") if axis in axes]
        return np.asarray(np.transpose(made, order if name == "A" else [axes.index("k"), axes.index("n")]))

    def _tile(self, name: str, number: int, batch: int, starts: dict[str, int], lengths: dict[str, int]) -> np.ndarray:
        found = self._scope(starts, lengths, batch).run(self.lines[name, number])["made"]
        shape = [lengths[a] for a in self.task.template.operands[name].axes if self.task.template.block(a)]
        return np.broadcast_to(np.asarray(found, np.float64), shape)

    def _scope(self, starts: dict[str, int], lengths: dict[str, int], batch: int) -> Scope:
        names: dict[str, Any] = {"b": tile(np.int32(batch))}
        names |= {f"p_{clean(name)}": Pointer(memory) for name, memory in self.memories.items()}
        names |= {name: self._descriptor(found) for found, name in self.slots.parameters.maps.items()}
        for axis, start in starts.items():
            names[f"r{axis}"] = tile(np.arange(start, start + lengths[axis], dtype=np.int32))
            names[f"start_{axis}"] = start
            names[f"BLOCK_{axis.upper()}"] = lengths[axis]
        return Scope(names)

    def _descriptor(self, found: Any) -> Descriptor:
        of = self.task.sizes.of
        sizes, strides = (tuple(map(of, given)) for given in (found.sizes, found.strides))
        return Descriptor(self.memories[found.buffer], of(found.offset), sizes, strides, found.block)

    def _is_turned(self) -> bool:
        """Whether the result's tiles have columns for rows."""
        return list(self._subtile()) == ["n", "m"]

    def _stored(self, sums: Sequence[Tile], batch: int, low: int) -> None:
        """The result's slot: at once where it goes by pointers, else tile by tile. `low` is the first row of the sums."""
        axes = list(self._subtile()) if len(self._subtile()) == 2 else ["m", "n"]
        first = {axis: low if axis == "m" else 0 for axis in axes}
        lengths = dict(zip(axes, sums[0].shape, strict=True))
        subtile = self._subtile() if self.task.template.results[self.result].access == "tma" else lengths
        steps = [range(first[a], first[a] + lengths[a], subtile[a]) for a in axes]
        for begin in itertools.product(*steps):
            place = tuple(slice(b - first[a], b - first[a] + subtile[a]) for a, b in zip(axes, begin, strict=True))
            parts = {f"acc{k}": tile(one[place]) for k, one in enumerate(sums)}
            self._scope(dict(zip(axes, begin, strict=True)), subtile, batch).run(self.store_lines, **parts)

    # ---- what came of it --------------------------------------------------------------------------------------------

    def problem(self, plan: Schedule, wanted: Sequence[torch.Tensor]) -> str:
        """What is wrong with the results; empty where nothing is."""
        outputs = [one.buffer for one in plan.graph.outputs if isinstance(one, ir.TensorArg)]
        for name, want in zip(outputs, wanted, strict=True):
            memory, buffer = self.memories[name], plan.graph.buffers[name]
            counts = memory.written[memory.valid]
            if not (counts == 1).all():
                return f"{int((counts != 1).sum())} elements of {name} are not stored once"
            sizes = Sizes(plan.graph.size_hints)
            shape, strides = ([sizes.of(e) for e in given] for given in (buffer.sizes, buffer.strides or ()))
            got = torch.from_numpy(memory.values).as_strided(shape, strides)
            bad = (got.reshape(want.shape) - want).abs() > 1e-9 * (1 + want.abs())
            if bad.any():
                wrong_at = bad.nonzero()
                low, high = wrong_at.amin(0).tolist(), wrong_at.amax(0).tolist()
                return f"{int(bad.sum())} of {bad.numel()} elements of {name} are wrong, from {low} to {high}"
        return ""
