"""The way in, and the list of stages that a graph goes through."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.fx import GraphModule

from kgen import config as configuration
from kgen import errors, failures, only, unusable, watch
from kgen.build import cpp, toolchain
from kgen.capture import decompositions, rng, torch_adapter
from kgen.capture.aot_cache import CompiledGraph, count_coverage
from kgen.capture.dimensions import count_from_front
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.freeze import freeze, frozen_inputs
from kgen.capture.operators import check_names, makes_quantised, resizes_storage
from kgen.capture.pool_taps import BACKWARDS, shorten_pool_positions
from kgen.capture.shared_storages import SameStorages, may_write, shared_views
from kgen.capture.torch_adapter import GraphInfo, Snapshot, copied_graph
from kgen.config import Config
from kgen.device import tf32_settings
from kgen.failures import Attempt
from kgen.templates import registry
from kgen.tuning.store import stores
from kgen.verdict import DEMANDS, REFUSED

if TYPE_CHECKING:
    from kgen.build.unit import UnitPlan
    from kgen.capture.segments import Segment
    from kgen.failures import Failure
    from kgen.ir import nodes as ir
    from kgen.ir.plan import Schedule
    from kgen.ir.program import MatrixSizes, Program
    from kgen.verdict import Verdict

    Lowered = tuple[GraphModule, ir.Graph]
    Scheduled = tuple[GraphModule, Schedule]
    Rendered = tuple[GraphModule, Schedule, UnitPlan]

__all__ = [
    "STAGES", "Stage", "build", "compile_again", "compile_bodies", "compile_graph", "kgen_backend", "lower", "reinplace",
    "render", "replace_random", "rewrite", "run_eagerly", "schedule",
]  # fmt: skip

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
In = TypeVar("In")
Out = TypeVar("Out")


class Stage(Protocol[In_contra, Out_co]):
    """From what the stage before it made to what the next one takes."""

    __name__: str

    def __call__(self, work: In_contra, info: GraphInfo, config: Config, /) -> Out_co: ...


STAGES_LOG = logging.getLogger("kgen.stages")


# An argument, a loop of three calls and the result.
LEAST_REPEATED = 5
# A graph of fewer nodes compiles fast enough as it is: nobody looks for loops with carried values.
LEAST_ROLLED = 256
# Nor, in one of fewer, for equal layers.
LEAST_SHARED = 48


# ---- the stages: each takes what the one before it made -----------------------------------------------------------------


def rewrite(gm: GraphModule, config: Config) -> tuple[Verdict, ...]:
    """Makes loops that Dynamo has unrolled batches or loops again, and equal layers calls of one, in its graph."""
    _concatenated(gm)
    _unshifted(gm, config)
    _resampled(gm, config)
    _with_margins(gm)
    batched, rolled, names = _batched(gm, config), _rolled(gm, config), {node.name for node in gm.graph.nodes}
    left = [one for one in batched if not rolled or one.outcome not in REFUSED or one.producer in names]
    return (*left, *rolled, *_hoisted(gm, config), *_shared(gm, config))


def _concatenated(gm: GraphModule) -> None:
    if any("circular" in node.args or "circular" in node.kwargs.values() for node in gm.graph.nodes):
        from kgen.capture.circular import concatenate_circular_pads  # noqa: PLC0415  few graphs pad so

        concatenate_circular_pads(gm)


def _unshifted(gm: GraphModule, config: Config) -> None:
    names = ("max", "amax")
    if config.numerics == "fast" and any(getattr(node.target, "__name__", node.target) in names for node in gm.graph.nodes):
        from kgen.capture.row_shifts import drop_row_shifts  # noqa: PLC0415  only where there is a maximum

        drop_row_shifts(gm)


def _resampled(gm: GraphModule, config: Config) -> None:
    if any(getattr(node.target, "__name__", "") in ("interpolate", "upsample") for node in gm.graph.nodes):
        from kgen.capture.resampling import keep_resampling_whole  # noqa: PLC0415  few graphs resample

        keep_resampling_whole(gm, config.numerics == "fast")


def _with_margins(gm: GraphModule) -> None:
    if any(getattr(node.target, "__name__", "").endswith("_margin_loss") for node in gm.graph.nodes):
        from kgen.capture.margin_losses import keep_margin_losses  # noqa: PLC0415  few graphs have such losses

        keep_margin_losses(gm)


def _batched(gm: GraphModule, config: Config) -> list[Verdict]:
    if not config.loop_batching or len(gm.graph.nodes) < LEAST_REPEATED:
        return []
    from kgen.capture.repeats import Search  # noqa: PLC0415  not for the smallest graphs

    search = Search(gm)
    if not search:
        return []
    from kgen.capture.batching import batch_repeats  # noqa: PLC0415  only where something repeats

    return batch_repeats(gm, search)


def _rolled(gm: GraphModule, config: Config) -> list[Verdict]:
    """Only whole graphs are recorded as CUDA graphs, or frozen: loops stay unrolled in them."""
    always = config.loop_rolling == "on"
    if config.loop_rolling == "off" or config.cudagraphs or config.freezing:
        return []
    if len(gm.graph.nodes) < (LEAST_REPEATED if always else LEAST_ROLLED):
        return []
    if not always and (torch_adapter.uses_cuda(gm) or not torch_adapter.has_right_scan()):
        return []  # where a call an iteration is slow, or was not measured
    from kgen.capture.rolling import LEAST_NODES, roll_repeats  # noqa: PLC0415  only for graphs that are slow to compile

    return roll_repeats(gm, 1 if always else LEAST_NODES)


def _hoisted(gm: GraphModule, config: Config) -> list[Verdict]:
    """In loops that stay unrolled."""
    if not config.loop_batching or len(gm.graph.nodes) < LEAST_REPEATED:
        return []
    from kgen.capture.hoisting import has_repeated_matmuls, hoist_matmuls  # noqa: PLC0415  not for the smallest graphs

    return hoist_matmuls(gm) if has_repeated_matmuls(gm) else []


def _shared(gm: GraphModule, config: Config) -> list[Verdict]:
    """Only whole graphs are recorded as CUDA graphs, or frozen: layers stay in them."""
    always = config.layer_sharing == "on"
    if config.layer_sharing == "off" or config.cudagraphs or config.freezing:
        return []
    if not always and (len(gm.graph.nodes) < LEAST_SHARED or DEMANDS.get()):
        return []  # a demand may be about a kernel that reaches from one layer into the next
    from kgen.capture import equal_layers  # noqa: PLC0415  not for small graphs

    share = equal_layers.share_layers if always else equal_layers.share_large_layers
    return share(gm, layouts=config.layouts != "off")


def compile_bodies(gm: GraphModule, info: GraphInfo, config: Config) -> GraphModule:
    """The graph with the bodies of its higher-order operators compiled, each through all stages."""
    if not _calls_bodies(gm):
        return gm
    from kgen.capture import control_flow  # noqa: PLC0415  most graphs have none
    from kgen.host import loops  # noqa: PLC0415
    from kgen.lowering.donated import donate  # noqa: PLC0415

    def compiled(name: str, body: GraphModule) -> CompiledGraph:
        results = frozenset(range(len(torch_adapter.output_values(body))))
        made = compile_graph(body, GraphInfo(f"{info.name}_{name}", "inference", frozenset(), results, info.shape_env), inner)
        count_coverage(made)
        return made

    inner = configuration.of_bodies(config)
    return control_flow.compile_bodies(donate(control_flow.with_batches(gm)), compiled, loops)


def replace_random(gm: GraphModule, info: GraphInfo, _config: Config) -> GraphModule:
    """Training graphs had this done before they were split (`rng.replace_random` on the joint graph)."""
    is_random = info.role == "inference" and any(node.target in rng.RULES for node in gm.graph.nodes)
    return rng.replace_random(gm) if is_random else gm


def run_eagerly(gm: GraphModule, info: GraphInfo, config: Config) -> CompiledGraph:
    """Every operator by itself, in eager: for `fallback="all"`, and where nothing else compiles."""
    from kgen.report.record import record_eager  # noqa: PLC0415  most processes need no more of it

    made = EagerGraph(gm, torch_adapter.output_strides(gm), info.failures)
    record_eager(info, made.coverage, config)
    return made


# The stages below are in `kgen.pipeline`, imported when one of them first runs: a process that finds its graphs in the cache
# never needs the compiler, and importing it takes longer than loading them.


def reinplace(gm: GraphModule, info: GraphInfo, config: Config) -> GraphModule:
    from kgen.pipeline import reinplace as stage  # noqa: PLC0415

    return stage(gm, info, config)


def lower(gm: GraphModule, info: GraphInfo, config: Config) -> Lowered:
    from kgen.pipeline import lower as stage  # noqa: PLC0415

    return stage(gm, info, config)


def schedule(work: Lowered, info: GraphInfo, config: Config) -> Scheduled:
    from kgen.pipeline import schedule as stage  # noqa: PLC0415

    return stage(work, info, config)


def render(work: Scheduled, info: GraphInfo, config: Config) -> Rendered:
    from kgen.pipeline import render as stage  # noqa: PLC0415

    return stage(work, info, config)


def build(work: Rendered, info: GraphInfo, config: Config) -> CompiledGraph:
    from kgen.pipeline import build as stage  # noqa: PLC0415

    return stage(work, info, config)


STAGES: tuple[
    Stage[GraphModule, GraphModule], Stage[GraphModule, GraphModule], Stage[GraphModule, GraphModule],
    Stage[GraphModule, Lowered], Stage[Lowered, Scheduled], Stage[Scheduled, Rendered], Stage[Rendered, CompiledGraph],
] = (compile_bodies, replace_random, reinplace, lower, schedule, render, build)  # fmt: skip


def compile_graph(gm: GraphModule, info: GraphInfo, config: Config, known: tuple[Failure, ...] = ()) -> CompiledGraph:
    """One functional aten graph through every stage, again and again without what turns out not to work (docs/failures.md).
    `known` are failures of passes before.

    Raises what the first attempt raises where the user can help it, and where `strict` says so."""
    in_eager = "all" in config.fallback or makes_quantised(gm) or resizes_storage(gm)
    attempt, frozen = Attempt(known, eager=in_eager), None
    kept = _Kept()
    while True:
        try:
            with unusable.without(attempt.unusable) if attempt.unusable else nullcontext():
                if attempt.eager:
                    return _Run(info, config, attempt).eager(gm)
                frozen = frozen or _frozen(gm, info, config)
                return _Run(frozen[1], config, attempt).compiled(frozen[0], kept)
        except Exception as cause:
            from kgen.recovery import attempt_after  # noqa: PLC0415  only where something has failed

            following = attempt_after(cause, attempt, (gm, info), config)
            if following is None:
                raise
            attempt = following


@dataclass(slots=True)
class _Kept:
    """The lowered graph of the last attempt and its failures. An attempt with the same failures, which is to do without a
    configuration of a template, begins after it: the stages from there on leave the graph as it is."""

    failures: tuple[Failure, ...] = ()
    lowered: Lowered | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """One way of a graph through stages; `attempt` notes which one it has come to."""

    info: GraphInfo
    config: Config
    attempt: Attempt

    def compiled(self, gm: GraphModule, kept: _Kept) -> CompiledGraph:
        """The graph through all stages, or those that an attempt before has not gone through with the same outcome."""
        stages: Sequence[Stage[Any, Any]] = STAGES  # each takes what the one before it makes, as their type says
        lowered = next((k for k, stage in enumerate(stages, 1) if stage.__name__ == "lower"), 0)
        if kept.lowered is None or kept.failures != self.attempt.failures:
            kept.failures, kept.lowered = self.attempt.failures, self._through(stages[:lowered], gm)
        made: CompiledGraph = self._through(stages[lowered:], kept.lowered)
        return made

    def _through(self, stages: Sequence[Stage[Any, Any]], work: Any) -> Any:
        for stage in stages:
            work = self.through(stage, work)
        return work

    def eager(self, gm: GraphModule) -> CompiledGraph:
        """The graph as calls of operators."""
        return self.through(run_eagerly, self.through(replace_random, gm))

    def through(self, stage: Stage[In, Out], work: In) -> Out:
        """What a stage makes."""
        self.attempt.stage = stage.__name__
        failures, started = self.attempt.failures, time.perf_counter()
        made = stage(work, replace(self.info, failures=failures) if failures else self.info, self.config)
        STAGES_LOG.debug("%s of %s: %.1f ms", stage.__name__, self.info.name, 1e3 * (time.perf_counter() - started))
        return made


# ---- the two doors ------------------------------------------------------------------------------------------------------


def kgen_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """What torch.compile calls for backend="kgen" (`kgen.entry`).

    Raises UnknownMode, UnknownOption, UnknownVariable, UnknownOperator or BadOptionValue;
    torch wraps them in its BackendCompilerFailed."""
    asked = {**options, **unknown} if isinstance(options, Mapping) and unknown else options or unknown
    config = ready_to_compile(mode, asked, not any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs))
    with _without_collections():
        passes, watching = Passes(config), watch.CALLS.watch
        shared = shared_views(example_inputs) if len(example_inputs) > 1 else ()
        given = GraphModule(gm, copied_graph(gm)) if watching is not None or shared else gm
        numbers = torch_adapter.numbers_known(gm)
        nothing: tuple[Verdict, ...] = ()
        verdicts = passes.attempt(rewrite, gm, nothing)
        segments, unreported = _segments(gm, config), iter((verdicts,))

        def captured(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            rewrites = next(unreported, nothing)  # the first segment says what was rewritten
            return torch_adapter.capture(
                gm,
                inputs,
                compile_graph=partial(passes.compile_graph, rewrites),
                joint_pass=passes.before_partitioning,
                cache_key=(*_cache_key(config), shared, numbers) if _is_cached(config, verdicts, bool(segments)) else None,
            )

        if segments:
            from kgen.capture.segments import Segmented  # noqa: PLC0415  only where bodies are called

            made: Callable[..., Any] = Segmented(gm, segments, captured)
        else:
            made = captured(gm, example_inputs)
        if shared and may_write():
            made = SameStorages(made, given, shared)
    return made if watching is None else watching(given, config, made)


def ready_to_compile(mode: str | None, options: Mapping[str, Any] | None, on_cpu: bool) -> Config:
    """The options of a call, with what compiling on the device needs on its way.

    Raises UnknownMode, UnknownOption, UnknownVariable, UnknownOperator or BadOptionValue."""
    config = configuration.from_call(mode, options)
    _check_operators(config)
    if config.debug is None:  # TORCH_COMPILE_DEBUG=1
        config = replace(config, debug=torch_adapter.debug_folder())
    if config.template_packages:
        registry.load_packages()
    cpp.prepare(on_cpu=on_cpu)
    return config


def _check_operators(config: Config) -> None:
    """Raises UnknownOperator: an operator that does not exist is in no graph, and would be overlooked."""
    if config.fallback:
        check_names("the option fallback", (name for name in config.fallback if name != "all"))
    for demand in DEMANDS.get():
        check_names(demand.door, (name.operator for name in (demand.first, demand.second) if name.operator))


def _segments(gm: GraphModule, config: Config) -> list[Segment]:
    """The graphs that bodies and what is between them are of their own; none where a graph is captured as a whole: as those are
    that are recorded or frozen, and those for GPUs, unless somebody asks: calls take as long as short kernels."""
    if config.cudagraphs or config.freezing or not _calls_bodies(gm):
        return []
    if torch_adapter.uses_cuda(gm) and config.layer_sharing != "on":
        return []
    from kgen.capture.segments import segments_of  # noqa: PLC0415  only where bodies are called

    return segments_of(gm)


def _calls_bodies(gm: GraphModule) -> bool:
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in gm.graph.nodes)


def _is_cached(config: Config, verdicts: Sequence[Verdict], segmented: bool) -> bool:
    """Whether AOTAutograd may keep the graph. What calls a body is not kept, and need not be looked for. A demand is about what
    is compiled now: a graph that was kept has not heard of it."""
    if not config.cache or config.debug or torch_adapter.is_asked_for() or only.current() is not None or DEMANDS.get():
        return False
    from kgen.verdict import Outcome  # noqa: PLC0415  a rewrite has loaded it, if there was one

    uncached = (Outcome.ROLLED,) if segmented else (Outcome.SHARED, Outcome.ROLLED)
    return not any(one.outcome in uncached for one in verdicts)


@dataclass
class Passes:
    """The passes in front of the stages. They only make graphs faster, so one that raises is left out, with a warning."""

    config: Config
    failures: tuple[Failure, ...] = ()

    def attempt(self, one: Callable[[GraphModule, Config], Out], gm: GraphModule, otherwise: Out) -> Out:
        """What a pass gives; `otherwise`, and the graph as it was, where it raises."""
        before = Snapshot(gm)
        try:
            return one(gm, self.config)
        except Exception as cause:
            if failures.is_strict(self.config) or not failures.may_replace(cause):
                raise
            from kgen.recovery import failed_pass  # noqa: PLC0415  only where something has failed

            gm.graph = before.restored()
            self.failures += (failed_pass(one.__name__, cause, gm),)
            return otherwise

    def before_partitioning(self, gm: GraphModule) -> GraphModule:
        """The joint graph of forward and backward, as it is split."""
        gm = count_from_front(rng.replace_random(gm))
        if _may_lay_out(gm, self.config):
            gm = self.attempt(laid_out, gm, gm)
        gm = _expanded(gm, decompositions.TRAINED)
        if any(_calls(gm, target) for target in BACKWARDS):
            gm = self.attempt(with_short_positions, gm, gm)
        if _calls(gm, torch.ops.aten.slice_scatter.default):
            gm = self.attempt(interleaved, gm, gm)
        if _has_large_logits(gm, self.config):
            gm = self.attempt(in_runs, gm, gm)
        if _calls(gm, torch.ops.aten.exp.default):
            gm = self.attempt(masked_weights, gm, gm)
        if self.config.recompute_scores != "off" and _calls(gm, torch.ops.aten.exp.default):
            gm = self.attempt(split_sums, gm, gm)
            gm = self.attempt(recomputed_scores, gm, gm)
            gm = self.attempt(without_sinks, gm, gm)
        return gm

    def compile_graph(self, rewrites: tuple[Verdict, ...], gm: GraphModule, info: GraphInfo) -> CompiledGraph:
        info = replace(info, rewrites=rewrites)
        if _calls(gm, torch.ops.aten.as_strided.default):
            from kgen.capture.as_strided import name_owners  # noqa: PLC0415  few graphs have such views

            gm = name_owners(gm)
        if info.role == "inference" and _calls(gm, torch.ops.aten.slice_scatter.default):
            gm = self.attempt(interleaved, gm, gm)
        if info.role == "inference" and _calls(gm, torch.ops.aten.exp.default):
            gm = self.attempt(masked_weights, gm, gm)
            gm = self.attempt(without_sinks, gm, gm)
            gm = self.attempt(split_sums, gm, gm)
        if torch_adapter.uses_cuda(gm):
            gm = self.attempt(bounded_masks, gm, gm)
        if self.config.tuning == "background" and not self.failures:
            from kgen.background import improving  # noqa: PLC0415  only where it is asked for

            return improving(gm, info, self.config, compile_again, torch_adapter.is_traced)
        return compile_again(gm, info, self.config, self.failures)


# Graphs that are compiled in the background wait for those that somebody waits for, and the other way round.
_COMPILING = threading.RLock()


def _unlock() -> None:
    """In a fork, which has no such thread."""
    global _COMPILING  # noqa: PLW0603
    _COMPILING = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def compile_again(gm: GraphModule, info: GraphInfo, config: Config, known: tuple[Failure, ...] = ()) -> CompiledGraph:
    """`compile_graph` with the compiler that the configuration names, one graph at a time."""
    with _COMPILING, toolchain_of(config), _without_collections():
        watching = watch.GRAPHS.watch
        if watching is not None:
            return watching(gm, info, config, partial(compile_graph, known=known))
        return compile_graph(gm, info, config, known)


def recomputed_scores(gm: GraphModule, config: Config) -> GraphModule:
    from kgen.capture.recompute_scores import recompute_scores  # noqa: PLC0415  only where something is a softmax

    return recompute_scores(gm, partial(_takes_both, config), as_eager=config.numerics != "fast")


def with_short_positions(gm: GraphModule, config: Config) -> GraphModule:
    """The joint graph with the positions of maxima in eight bits, on a GPU: a CPU takes longer to compare such numbers."""
    if not config.gpu_interpreter and not torch_adapter.uses_cuda(gm):
        return gm
    return shorten_pool_positions(gm)


def interleaved(gm: GraphModule, _config: Config) -> GraphModule:
    """The graph with a stack in the place of writes at every k-th element that fill a tensor between them."""
    from kgen.capture.interleaved import stack_interleaved_writes  # noqa: PLC0415  few graphs write so

    return stack_interleaved_writes(gm)


def masked_weights(gm: GraphModule, config: Config) -> GraphModule:
    """The graph with -inf in scores whose weights are 0 in the end."""
    if config.numerics != "fast" or not _calls(gm, torch.ops.aten.where.self):
        return gm
    from kgen.capture.masked_weights import simplify_masked_weights  # noqa: PLC0415  only where something is masked

    return simplify_masked_weights(gm)


def split_sums(gm: GraphModule, config: Config) -> GraphModule:
    """The graph with sums of softmaxes that are multiplied taken apart, where templates make one kernel of each: of a graph of
    both directions, in both."""
    if config.numerics != "fast":
        return gm
    from kgen.capture.weighted_sums import split_weighted_sums  # noqa: PLC0415  only where something is a softmax

    return split_weighted_sums(gm, partial(_takes_both if _is_trained(gm) else _takes_softmax, config))


def without_sinks(gm: GraphModule, config: Config) -> GraphModule:
    """The graph without the columns of sinks in its softmaxes, where templates make one kernel of each softmax."""
    if config.numerics != "fast" or not _calls(gm, torch.ops.aten.cat.default):
        return gm
    from kgen.capture.sink_column import take_sinks_apart  # noqa: PLC0415  only where something is a softmax

    made = take_sinks_apart(gm, partial(_takes_softmax, config))
    return split_sums(made, config) if _is_trained(gm) else made


def bounded_masks(gm: GraphModule, config: Config) -> GraphModule:
    """The graph with spans of what masks keep, where templates leave tiles of scores out."""
    from kgen.capture.higher_order import MEANINGS, expand  # noqa: PLC0415  only where something is on a GPU

    if any(node.target in MEANINGS for node in gm.graph.nodes):
        gm = expand(gm)
    if not _calls(gm, torch.ops.aten.where.self):
        return gm
    from kgen.capture.mask_spans import bound_masks  # noqa: PLC0415  only where something is masked

    return bound_masks(gm, _is_trained(gm), partial(_takes_softmax, config))


def _is_trained(gm: GraphModule) -> bool:
    """Whether a graph takes gradients of results: one of both directions, or of backward alone."""
    return any(str(node.target).startswith("tangents") for node in gm.graph.nodes if node.op == "placeholder")


# Bytes of logits from which on backward makes their gradient in runs.
_LARGE_LOGITS = 128 << 20


def _has_large_logits(gm: GraphModule, config: Config) -> bool:
    """Whether gradients of logits may be made in runs."""
    if config.chunked_logits == "off" or config.numerics != "fast":
        return False
    return any(_bytes_of_matmul(node) >= _least_logits(config) for node in gm.graph.nodes)


def _least_logits(config: Config) -> int:
    return 1 if config.chunked_logits == "on" else _LARGE_LOGITS


def in_runs(gm: GraphModule, config: Config) -> GraphModule:
    """The joint graph with gradients of large logits in runs of columns."""
    from kgen.capture.chunked_logits import chunk_logits  # noqa: PLC0415  only where a matmul makes much

    return chunk_logits(gm, lambda size: size >= _least_logits(config))


def _bytes_of_matmul(node: torch.fx.Node) -> int:
    if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return 0
    value = node.meta["val"]
    return 0 if any(not isinstance(n, int) for n in value.shape) else value.numel() * value.dtype.itemsize


def _takes_both(config: Config, device: torch.device, sizes: MatrixSizes | None = None) -> bool:
    """Whether templates make one kernel of a softmax between contractions, and one of contractions whose elements meet.

    The default mode may leave to the library what templates without measurements make: then nothing is computed again."""
    if config.recompute_scores == "on":
        return True
    taken = _taken(config, device, sizes)
    return any(one.seconds for one in taken) and any(one.joins for one in taken)


def _takes_softmax(config: Config, device: torch.device, sizes: MatrixSizes) -> bool:
    """Whether templates make one kernel of a softmax between contractions."""
    return any(one.seconds for one in _taken(config, device, sizes))


def _taken(config: Config, device: torch.device, sizes: MatrixSizes | None = None) -> Sequence[Program]:
    """The programs that templates take where a mode lets them."""
    if not config.templates or not config.fusion:
        return ()
    kind = "cuda" if config.gpu_interpreter else device.type
    if config.autotune:
        return registry.programs(kind)
    arch = torch_adapter.gpu_facts(device)["arch"] if sizes is not None and device.type == "cuda" else 0
    return registry.calibrated_programs(kind, sizes, arch)


def laid_out(gm: GraphModule, config: Config, frozen: frozenset[str] = frozenset()) -> GraphModule:
    """The graph with a layout chosen for each tensor around its convolutions."""
    if not _may_lay_out(gm, config):
        return gm
    from kgen.capture.layouts import choose_layouts  # noqa: PLC0415  only where something is a convolution
    from kgen.cost import layouts  # noqa: PLC0415

    return choose_layouts(gm, layouts, frozen)


def _may_lay_out(gm: GraphModule, config: Config) -> bool:
    return config.layouts != "off" and _has_convolutions(gm)


def _has_convolutions(gm: GraphModule) -> bool:
    return _calls(gm, torch.ops.aten.convolution.default)


def _calls(gm: GraphModule, target: torch._ops.OpOverload) -> bool:
    return any(node.target is target for node in gm.graph.nodes)


def _frozen(gm: GraphModule, info: GraphInfo, config: Config) -> tuple[GraphModule, GraphInfo]:
    """The graph without what depends on its module's tensors alone: further inputs bring that. Layouts are chosen before, and
    gradients that hide images taken apart after that, as `Passes.before_partitioning` does with joint graphs.

    Raises FreezingInTraining."""
    if not config.freezing:
        gm = laid_out(gm, config) if info.role == "inference" else gm
        return _expanded(gm, decompositions.GRADIENTS), info
    if info.role != "inference":
        raise errors.FreezingInTraining()
    gm = laid_out(_folded(gm, info, config), config, frozen_inputs(gm, info.static_inputs))
    gm = _expanded(gm, decompositions.GRADIENTS)
    gm, freezing = freeze(gm, info.static_inputs, config.numerics == "fast")
    return gm, replace(info, freezing=freezing, static_inputs=info.static_inputs | freezing.inputs)


def _expanded(gm: GraphModule, meanings: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    """The graph with every call of an operator in `meanings` written out."""
    if not any(node.target in meanings for node in gm.graph.nodes):
        return gm
    from kgen.capture.higher_order import expand  # noqa: PLC0415  most graphs have none

    return expand(gm, meanings)


def _folded(gm: GraphModule, info: GraphInfo, config: Config) -> GraphModule:
    """The graph with what follows convolutions in their weights, where the order of multiplications is free."""
    if config.numerics != "fast" or not _has_convolutions(gm):
        return gm
    from kgen.capture.fold_channels import fold_channels  # noqa: PLC0415  only where something is a convolution

    return fold_channels(gm, frozen_inputs(gm, info.static_inputs))


@contextmanager
def _without_collections() -> Iterator[None]:
    """While a graph is compiled, much is made and little is garbage in cycles, but each full collection walks everything that
    torch has loaded, which takes a third of a second."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def toolchain_of(config: Config) -> AbstractContextManager[object]:
    """The compiler, the instruction set and the caches' folder that this call names, for stages that ask for them."""
    named: dict[str, Any] = {
        "compiler": config.compiler, "isa": config.isa, "compile_seconds": config.compile_seconds,
        "cache_dir": config.cache_dir, "debug_info": config.debug_info or None,
    }  # fmt: skip
    return configuration.override(**{name: value for name, value in named.items() if value is not None})


def _cache_key(config: Config) -> tuple[Any, ...]:
    """Lanes and tiles are chosen for the instruction set that was found, which machines that share a cache need not share,
    templates among those that have been registered, and by what was measured. Where that happens while compiling, what is
    compiled is as good as the file that it leaves behind. Torch's own key has no setting of convolutions."""
    tuned = () if config.autotune else stores(config).fingerprint()
    with toolchain_of(config):
        return (*configuration.code_key(config), toolchain.isa().name, registry.fingerprint(), tuned, tf32_settings())
