"""Drives many small functions through the real C++ back end at the price of few compiler runs.

`run_rows` traces every row as AOTAutograd does, lowers, schedules and renders it, then builds the kernels of all rows together
(equal kernels once), and runs each row through the native runtime against eager. One row's failure, a compile error too, is
that row's alone. With ``gpu=True`` the kernels are Triton's and run in its interpreter.

``python tests/codegen.py NAME...`` runs the table's rows whose name starts with one of the arguments and prints their kernels.
"""

from __future__ import annotations

import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import op_table
import torch
from op_case import ANY, capture, same
from op_table_indexing import CASES
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from kgen.build import cpp
from kgen.build.toolchain import cpu_device, register_bytes
from kgen.build.unit import PRELUDE
from kgen.capture.decompositions import TABLE
from kgen.errors import InputMismatch, KernelBuildFailed
from kgen.host import native
from kgen.host.assemble import assemble
from kgen.ir.plan import Launch, Schedule, variants
from kgen.ir.verify import verify
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.only import Only
from kgen.reference.evaluate import evaluate_graph
from kgen.rendered.kernel_call import KernelCall, Rendered
from kgen.scheduler import Options, schedule
from kgen.templates.registry import render_step
from kgen.templates.render import canonical_text
from tests.rendering import decisions

# Functions in one translation unit: the header costs half a second a unit, and fewer units leave a core idle at the end.
PER_UNIT = 40

Check = Callable[[Sequence[Any], Any, Any], None]


@dataclass(frozen=True)
class Row:
    """A function with the argument lists to call it with, all through one graph: the first is traced, with symbolic sizes when
    `dynamic`. `agrees(args, got, want)` raises when results differ; these are the results of the call, followed by the
    arguments as the call left them. `externs` are the operators that may be library calls (None: any). With gradients, the
    graph of both goes through `before_split`, and each of the two through `after_split`."""

    name: str
    fn: Callable[..., Any]
    samples: Sequence[Sequence[Any]]
    agrees: Check
    externs: frozenset[str] | None = frozenset()
    dynamic: bool = False
    constants: bool = False  # the function uses tensors of its own, which AOTAutograd alone does not take
    may_refuse: bool = False  # samples after the first may be ones that the graph was not made for
    backward: bool = False  # gradients too: `agrees` gets them after the results
    strides: bool = False  # also compare strides of results
    oracle: bool = False  # also compare with the evaluator on the lowered graph
    before_split: Callable[[GraphModule], GraphModule] | None = None
    after_split: Callable[[GraphModule], GraphModule] | None = None


@dataclass
class _Graph:
    """One graph of a row between its stages; `run` is set once its kernels are loaded."""

    plan: Schedule
    eager: GraphModule
    calls: dict[str, KernelCall] = field(default_factory=dict)
    symbols: set[str] = field(default_factory=set)
    run: Callable[[list[Any]], Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return self.eager(*args) if self.run is None else self.run(list(args))


@dataclass
class _Job:
    row: Row
    compiled: Callable[..., Any] | None = None
    graphs: list[_Graph] = field(default_factory=list)
    error: str = ""


def run_rows(rows: Iterable[Row], *, show: bool = False, gpu: bool = False, only: Only | None = None) -> dict[str, str]:
    """The failures by row name: empty when every row agrees with eager. `only` gives all matmuls to one template."""
    jobs = [_Job(row) for row in rows]
    functions = _Functions(options_for(gpu, only))
    for job in jobs:
        _attempt(job, lambda job=job: _trace(job, functions))
    if show:
        print("\n".join(functions.texts.values()))
    broken, libraries = functions.build()
    for job in jobs:
        for graph in job.graphs:
            for symbol in graph.symbols & broken.keys():
                job.error = job.error or broken[symbol]
        if not job.error:
            _attempt(job, lambda job=job: _run(job, libraries, gpu))
    return {job.row.name: job.error for job in jobs if job.error}


def report(failures: dict[str, str]) -> str:
    """All failures, the short ones first: what a person reads."""
    return "\n".join(f"{name}: {error}" for name, error in sorted(failures.items(), key=lambda item: len(item[1])))


def _attempt(job: _Job, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as cause:  # one row must not take the others along
        where = traceback.extract_tb(cause.__traceback__)[-1]
        job.error = f"{type(cause).__name__}: {str(cause).strip()[:700]} [{where.filename.rsplit('/', 1)[-1]}:{where.lineno}]"


# ---- from a function to kernels -------------------------------------------------------------------------------------


def _trace(job: _Job, functions: _Functions) -> None:
    """Traces on the first sample. The first call runs the graph in eager: its kernels do not exist yet."""
    row = job.row

    def compile_graph(gm: GraphModule, _: Any = None) -> Callable[..., Any]:
        with _disable_current_modes():  # as kgen.capture.torch_adapter does: reading constants needs real tensors
            gm = gm if row.after_split is None else row.after_split(gm)
            graph = _Graph(plan_of(gm, functions.options), gm)
            functions.add(graph)
        job.graphs.append(graph)
        return graph

    if row.constants:
        made = compile_graph(capture(row.fn, row.samples[0], "symbolic" if row.dynamic else "fake"))
        job.compiled = lambda *args: made(*(a for a in args if isinstance(a, torch.Tensor | int)))
    else:
        options: dict[str, Any] = {"decompositions": TABLE, "keep_inference_input_mutations": True}
        if row.backward:
            options["partition_fn"] = partial(_split, row.before_split)
        job.compiled = aot_function(row.fn, compile_graph, dynamic=row.dynamic, **options)
        _call(row, job.compiled, copied(row.samples[0]))
    if row.externs is not None:
        found = [str(c.node.target) for g in job.graphs for c in g.plan.calls]
        left = [name for name in found if name.split(".")[1] not in row.externs]
        assert not left, f"library calls: {left}"


def _split(change: Callable[[GraphModule], GraphModule] | None, gm: GraphModule, inputs: Any, **settings: Any) -> Any:
    return min_cut_rematerialization_partition(gm if change is None else change(gm), inputs, **settings)


def options_for(gpu: bool = False, only: Only | None = None) -> Options:
    """The scheduler's options for this machine. `gpu`: the CPU's tensors stand for a GPU's."""
    return Options(gpu_everywhere=gpu, cpu=cpu_device(), only=only)


def plan_of(gm: GraphModule, options: Options | None = None) -> Schedule:
    """The schedule of a traced graph, which stays as it is."""
    options = options or options_for()
    values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    env = next((v.fake_mode.shape_env for v in values if hasattr(v, "fake_mode")), None)
    context = LoweringContext(shape_env=env, gpu_everywhere=options.gpu_everywhere)
    return schedule(verify(lower(reinplace(_copy(gm)), context), "lower"), options)


def _copy(gm: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


class _Functions:
    """The distinct kernels of many graphs, and the libraries made of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.texts: dict[str, str] = {}
        self.objects: dict[str, tuple[str, ...]] = {}
        self.known: dict[str, str] = {}  # canonical text -> symbol
        self.serial = 0

    def add(self, graph: _Graph) -> None:
        self.serial += 1
        for number, kernel in enumerate(one for step in graph.plan.kernels for one in variants(step)):
            symbol = f"c{self.serial}_{number}_{kernel.name}"
            made = rendered(kernel, graph.plan, symbol, self.options)
            if isinstance(made, KernelCall):
                graph.calls[kernel.name] = made
                continue
            canonical = canonical_text(made.text.replace(symbol, "kernel"), made.names)
            symbol = self.known.setdefault(canonical, symbol)
            self.texts.setdefault(symbol, made.text)
            self.objects.setdefault(symbol, made.objects)
            graph.calls[kernel.name] = KernelCall(symbol, made.buffers, made.sizes)
            graph.symbols.add(symbol)

    def build(self) -> tuple[dict[str, str], list[Any]]:
        """(compiler messages by symbol, loaded libraries)."""
        if not self.texts:
            return {}, []
        broken: dict[str, str] = {}
        while True:
            groups = _groups({s: t for s, t in self.texts.items() if s not in broken})
            units = [cpp.Unit(f"codegen{k}", _source(group), objects=self._linked(group)) for k, group in enumerate(groups)]
            try:
                return broken, [cpp.load_library(path) for path in cpp.build_units(units)]
            except KernelBuildFailed as failure:
                found = _blame(failure, {s for group in groups for s in group})
                broken.update(found or self._alone(groups[int(failure.details["kernel"].removeprefix("codegen"))]))

    def _linked(self, group: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for symbol in group for text in self.objects[symbol]))

    def _alone(self, group: dict[str, str]) -> dict[str, str]:
        """Which functions of a unit do not compile, found by compiling each."""
        broken = {}
        for symbol, text in group.items():
            try:
                cpp.build_unit("codegen0", _source({symbol: text}))
            except KernelBuildFailed as failure:
                broken[symbol] = str(failure)[:2000]
        if not broken:
            raise AssertionError(f"a unit fails although each of its kernels compiles: {', '.join(group)}")
        return broken


def rendered(step: Launch, plan: Schedule, symbol: str, options: Options) -> Rendered | KernelCall:
    """The C++ or the Triton kernel of a step; GPU kernels are tiled as for an H200."""
    return render_step(step, symbol, decisions(plan.graph, register_bytes(), options))


def _groups(texts: dict[str, str]) -> list[dict[str, str]]:
    items = list(texts.items())
    return [dict(items[k : k + PER_UNIT]) for k in range(0, len(items), PER_UNIT)]


def _source(group: dict[str, str]) -> str:
    """The functions, each under a file name of its own, so that the compiler's messages say whose fault it is."""
    return PRELUDE + "".join(f'#line 1 "{symbol}"\n{text}\n' for symbol, text in group.items())


def _blame(failure: KernelBuildFailed, symbols: set[str]) -> dict[str, str]:
    """The first error of each function that the compiler's messages name."""
    found: dict[str, str] = {}
    current = ""
    for line in failure.details["output"].splitlines():
        match = re.match(r"(c\d+_\d+_\w*):", line)
        current = match[1] if match and match[1] in symbols else current
        if current and "error:" in line:
            found.setdefault(current, f"does not compile: {line}")
    return found


# ---- running --------------------------------------------------------------------------------------------------------


def _run(job: _Job, libraries: list[Any], gpu: bool) -> None:
    for graph in job.graphs:
        assembled = assemble(graph.plan, graph.calls, gpu)
        graph.run = native.load(assembled.program, libraries, assembled.constants, assembled.callables)
    for sample in job.row.samples:
        try:
            _compare(job, sample)
        except InputMismatch:
            if not job.row.may_refuse or sample is job.row.samples[0]:
                raise
    if job.row.oracle:
        for graph in job.graphs:
            graph.run = partial(evaluate_graph, graph.plan.graph)
        try:
            _compare(replace(job, row=replace(job.row, strides=False)), job.row.samples[0])
        except AssertionError as cause:
            raise AssertionError(f"a lowering is wrong, as the evaluator has it too: {cause}") from cause


def _compare(job: _Job, sample: Sequence[Any]) -> None:
    """Results, and the arguments after the call, against eager's; strides against those of the traced graph in eager."""
    ours, theirs = copied(sample), copied(sample)
    got, want = _call(job.row, job.compiled, ours), _call(job.row, job.row.fn, theirs)
    job.row.agrees(sample, [got, *ours], [want, *theirs])
    if job.row.strides:
        _compare_strides(job, sample, got)


def _compare_strides(job: _Job, sample: Sequence[Any], got: Any) -> None:
    with _in_eager(job.graphs):
        traced = _call(job.row, job.compiled, copied(sample))
    for position, (a, b) in enumerate(zip(tensors(got), tensors(traced), strict=True)):
        if not _overlaps(b):
            assert _strides(a) == _strides(b), f"result {position} has strides {a.stride()}, not {b.stride()}"


def _call(row: Row, fn: Callable[..., Any] | None, args: Sequence[Any]) -> Any:
    assert fn is not None
    if row.backward:
        return gradients(fn)(*args)
    with torch.no_grad():
        return fn(*args)


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the results of `fn` and the gradients of a weighted sum of them."""

    def run(*args: Any) -> list[torch.Tensor]:
        leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
        with torch.enable_grad():
            results = tensors(fn(*(leaf.clone() for leaf in leaves)))  # a leaf itself must not be written to
            parts = [
                (r.double() * torch.linspace(0.5, 1, r.numel(), device=r.device).view(r.shape)).sum()
                for r in results
                if r.requires_grad
            ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(sum(parts), wanted, allow_unused=True) if parts else []
        return [
            *(r.detach() for r in results),
            *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=False)),
        ]

    return run


@contextmanager
def _in_eager(graphs: Sequence[_Graph]) -> Iterator[None]:
    runs = [graph.run for graph in graphs]
    for graph in graphs:
        graph.run = None
    yield
    for graph, run in zip(graphs, runs, strict=True):
        graph.run = run


def _strides(t: torch.Tensor) -> list[int]:
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if t.numel() else []


def _overlaps(t: torch.Tensor) -> bool:
    """Whether elements share memory other than along dimensions of stride zero."""
    steps = [(s, n) for s, n in zip(t.stride(), t.shape, strict=True) if s]
    return t.numel() > 0 and 1 + sum((n - 1) * s for s, n in steps) < math.prod(n for _, n in steps)


def copied(args: Sequence[Any]) -> list[Any]:
    """The arguments with tensors of their own, in the same layout (at the same offset from an aligned address)."""
    return [_copied(a) for a in args]


def _copied(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return type(arg)(_copied(a) for a in arg)
    if not isinstance(arg, torch.Tensor):
        return arg
    storage = torch.empty(0, dtype=arg.dtype, device=arg.device).set_(arg.untyped_storage().clone())  # type: ignore[call-overload]
    return storage.as_strided(arg.size(), arg.stride(), arg.storage_offset())


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor of nested lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for item in tree for t in tensors(item)] if isinstance(tree, list | tuple) else []


# ---- the two op tables ----------------------------------------------------------------------------------------------


def _table_row(case: op_table.Case, samples: Sequence[Any], name: str, dynamic: bool = False) -> Row:
    entry = case.entry

    def agrees(args: Sequence[Any], got: Any, want: Any) -> None:
        op_table.assert_agrees(with_arguments(entry.fn), tuple(args), got, want, entry.tolerance)

    return Row(name, entry.fn, samples, agrees, None if entry.extern else frozenset(), dynamic)


def elementwise_rows(dtypes: Sequence[torch.dtype], *, every_sample: bool = False, last_sample: bool = False) -> list[Row]:
    """Rows of `op_table.TABLE`: one a sample, of the telling ones, of all, or of the last alone."""
    rows = []
    for case in op_table.cases(op_table.TABLE):
        if case.dtype in dtypes:
            samples = case.samples()
            chosen = range(len(samples)) if every_sample else telling(samples)[-1 if last_sample else 0 :]
            rows += [_table_row(case, [samples[k]], f"{case}-{k}") for k in chosen]
    return rows


def telling(samples: Sequence[Any]) -> list[int]:
    """The samples that find most for their compile time: the one with most elements, and the last (special floats)."""
    sizes = [sum(t.numel() for t in tensors(s)) for s in samples]
    last = len(samples) - 1
    return sorted({sizes.index(max(sizes)), last})


def plain_agreement(fn: Callable[..., Any]) -> Check:
    """Agreement with eager within the dtypes' tolerances, or no farther than eager from the result in float64."""
    return lambda args, got, want: op_table.assert_agrees(with_arguments(fn), tuple(args), got, want)


def with_arguments(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the results of `fn` and the arguments as it left them."""
    return lambda *args: [fn(*args), *args]


def near(fn: Callable[..., Any], tolerance: float | None = None) -> Check:
    """Agreement of results whose elements are sums of many roundings: the largest error of each result, in units of its
    largest element, is at most twice eager's, or within the dtype's tolerance."""

    def agrees(args: Sequence[Any], got: Any, want: Any) -> None:
        left, right = tensors(got), tensors(want)
        assert len(left) == len(right)
        exact = tensors(with_arguments(fn)(*_widened(copied(args))))
        for position, (a, b, e) in enumerate(zip(left, right, exact, strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"result {position}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
            if not b.is_floating_point():
                assert torch.equal(a, b), f"result {position} ({b.dtype}) differs at {_where(a != b)}"
                continue
            assert torch.equal(a.isfinite(), b.isfinite()), (
                f"result {position}: not finite at {_where(a.isfinite() != b.isfinite())}"
            )
            ours, theirs, scale = (
                float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0 for x in (a - e, b - e, b * 1.0)
            )
            bound = 2 * theirs + (tolerance or op_table.TOLERANCE[b.dtype]) * max(scale, 0.1)
            assert ours <= bound, f"result {position} is off by {ours:.3g} where {bound:.3g} is admitted"

    return agrees


def _widened(args: Any) -> Any:
    return _mapped(lambda t: t.double() if t.is_floating_point() else t, args)


def _where(differs: torch.Tensor) -> str:
    found = differs.nonzero()
    return f"{found[0].tolist()} and {len(found) - 1} more of {differs.numel()}" if len(found) else "nowhere"


def indexing_rows(dtypes: Sequence[torch.dtype]) -> list[Row]:
    """Rows of `op_table_indexing.CASES`."""
    rows = []
    for case in (c for family in CASES.values() for c in family):
        for dtype in case.dtypes:
            if dtype in dtypes:
                name = f"{case.name}-{str(dtype).removeprefix('torch.')}"
                rows.append(Row(name, case.fn, [case.make_inputs(dtype)], _same, case.externs, constants=True))
    return rows


def _same(_: Sequence[Any], got: Any, want: Any) -> None:
    left, right = tensors(got), tensors(want)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        same(a, b)


# ---- variations of rows ---------------------------------------------------------------------------------------------


def laid_out(row: Row, how: str) -> Row:
    """The row with its tensors laid out in another way."""
    return replace(row, samples=[_mapped(_LAYOUTS[how], sample) for sample in row.samples])


def possible(row: Row) -> bool:
    """Whether eager computes it: a view does not suit every layout."""
    try:
        for sample in row.samples:
            row.fn(*sample)
    except (RuntimeError, ValueError):
        return False
    return True


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(change, item) for item in tree)
    return change(tree) if isinstance(tree, torch.Tensor) else tree


def stepped(x: torch.Tensor) -> torch.Tensor:
    """Every second element of each dimension of a larger array."""
    room = torch.zeros([2 * n for n in x.shape], dtype=x.dtype)
    view = room[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def offset(x: torch.Tensor) -> torch.Tensor:
    """A window into a larger array."""
    room = torch.zeros([n + 3 for n in x.shape], dtype=x.dtype)
    return room[tuple(slice(1, 1 + n) for n in x.shape)].copy_(x)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Dimensions in memory in reverse order."""
    back = tuple(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, one element behind an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


_LAYOUTS = {"stepped": stepped, "offset": offset, "turned": turned, "misaligned": misaligned}


def doubled(row: Row) -> Row:
    """The row with symbolic sizes, and a second sample in which every size above one is twice as large, where the function
    takes it. A graph that fixed a size refuses the second one."""
    first = row.samples[0]
    try:
        second = _mapped(_doubled, first)
        row.fn(*copied(second))
    except (RuntimeError, IndexError, ValueError):
        return replace(row, dynamic=True, samples=[first])
    return replace(row, dynamic=True, samples=[first, second], may_refuse=True)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.repeat([2 if n > 1 else 1 for n in x.shape])


def main(names: Sequence[str]) -> int:
    every = (*ANY, torch.float16, torch.int8, torch.int16)
    rows = [*elementwise_rows(every, every_sample=True), *indexing_rows(every)]
    chosen = [row for row in rows if any(row.name.startswith(name) for name in names)]
    failures = run_rows(chosen, show=True)
    print(f"{len(chosen)} rows, {len(failures)} failed")
    print(report(failures))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
