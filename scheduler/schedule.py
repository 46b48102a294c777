"""The schedule stage: dependencies, fusion, order, sections, memory plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import Batch, Call, Kernel, Schedule, Step, members
from kgen.ir.sizes import Sizes
from kgen.ir.verify import defined_once
from kgen.scheduler.analysis.dependencies import edges, overwritten, topological
from kgen.scheduler.analysis.items import Group, Members, accumulators, make_item
from kgen.scheduler.analysis.layouts import freeze_layouts
from kgen.scheduler.analysis.memo import once, remembering
from kgen.scheduler.analysis.memory import plan_memory, reads, writes
from kgen.scheduler.fusion import cost
from kgen.scheduler.fusion.combo_kernels import batch
from kgen.scheduler.fusion.fuse import Fuser
from kgen.scheduler.fusion.grouped_matmuls import Joining, join
from kgen.scheduler.kernels.sections import make_kernel
from kgen.scheduler.kernels.workspaces import provide_workspaces
from kgen.scheduler.selection.choose import (
    Given,
    best,
    choose_template,
    demanded,
    part_blocks,
    problems,
    product_of,
    products_of,
)
from kgen.scheduler.selection.size_buckets import Best, forget_first_sizes
from kgen.scheduler.selection.tuning_queries import Answers, ask
from kgen.scheduler.tiling.tiles import Gpu
from kgen.scheduler.transforms import operand_padding
from kgen.scheduler.transforms.candidates_of_contractions import Operands, items_of, offer
from kgen.scheduler.transforms.column_reduction import Setting, carry_columns
from kgen.scheduler.transforms.concat_split import in_slices, left_alone, slice_verdicts
from kgen.scheduler.transforms.full_row_tiles import refusal_of, rows_apart, rows_in
from kgen.scheduler.transforms.library_fusion import kept_apart, usable, verdicts, with_fused_calls
from kgen.scheduler.transforms.operand_reduction import Setting as Beside
from kgen.scheduler.transforms.operand_reduction import carry_sums, why_apart
from kgen.scheduler.transforms.operand_reduction import refusal_of as sums_refusal
from kgen.scheduler.transforms.output_split import in_pieces, left_apart, whole_of
from kgen.scheduler.transforms.output_split import refusal_of as pieces_refusal
from kgen.scheduler.transforms.recognition import NotTaken, Recognised, applied, may_hold_programs, raise_not_taken, recognised
from kgen.scheduler.transforms.recompute import computations, second_of, stored
from kgen.scheduler.transforms.recompute_trial import Pricing, Trial, judged, trial_of
from kgen.scheduler.transforms.scatter_epilogue import refused_updates, why_updates_apart
from kgen.scheduler.transforms.split_k import may_cut, partial_of, parts_of, possible_parts
from kgen.scheduler.transforms.split_reduction import split_reduction
from kgen.scheduler.transforms.tile_partials import Tiles, alone, partials
from kgen.templates import registry
from kgen.templates.problem import Device
from kgen.tuning.answer import Answer, Oracle, Place, place
from kgen.tuning.only import Only
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict


@dataclass(frozen=True, slots=True)
class Options:
    """Switches of the scheduler. `demands` are the user's require_fused / forbid_fused."""

    fusion: bool = True
    demands: tuple[FusionDemand, ...] = ()
    gpu: Gpu = field(default_factory=Gpu)
    gpu_everywhere: bool = False  # kernels on the CPU's tensors are made for a GPU as well, for its interpreter
    templates: bool = True
    cpu: Device = field(default_factory=lambda: Device("cpu", isa="generic"))
    only: Only | None = None  # the template that takes all products
    oracle: Oracle | None = None  # knows measured times
    stable: bool = False  # these never change results
    prologues: bool = True  # operands may be computed in a product's kernel
    scales: bool = True  # and scaled behind its sum
    siblings: bool = True  # what needs nothing of each other may share a kernel
    joint: bool = True  # products too, with an operand in common
    twice: bool = True  # products may be computed again for what needs their elements and reductions of these
    copies: bool = True  # operands may be copied into rows that begin at lines of a GPU's cache
    fused_calls: bool = True  # the library may compute a product and what follows in one call
    interpreted: bool = False  # kernels for a GPU are for Triton's interpreter

    def target(self, device: str) -> str:
        """The language of the kernels on a device."""
        return "triton" if self.gpu_everywhere or device.startswith("cuda") else "cpp"

    def device(self, graph: ir.Graph, buffer: str) -> Device:
        """What templates need to know of the device that a buffer is on."""
        if self.target(str(graph.buffers[buffer].device)) == "cpp":
            return self.cpu
        gpu = self.gpu
        return Device(
            "cuda", gpu.arch, gpu.processors, gpu.shared, flops=gpu.flops, bandwidth=gpu.bandwidth, interpreted=self.interpreted
        )

    def may_fuse_calls(self, graph: ir.Graph) -> Callable[[str], bool]:
        """Of which results on: a CPU's library makes two passes of what is one call."""
        on = self.fusion and self.fused_calls
        return lambda out: on and self.target(str(graph.buffers[out].device)) == "triton"


def schedule(graph: ir.Graph, options: Options | None = None) -> Schedule:
    """Groups the graph's nodes into kernels and orders them, with as many programs of templates as these take."""
    options = options or Options()
    places, refusals = _programs(graph, options), list[Verdict]()
    while places:
        try:
            plan = _schedule(applied(graph, *places), options)
        except NotTaken as refused:
            places = [place for place in places if place.out != refused.out]
            refusals.append(refused.verdict)
        except errors.FusionRequired:
            places = []
        else:
            plan.verdicts[:0] = refusals
            return plan
    plan = _schedule(graph, options)
    plan.verdicts[:0] = refusals
    return plan


def _programs(graph: ir.Graph, options: Options) -> list[Recognised]:
    """Places of programs that templates implement. These may divide behind a sum, and add up in the order of their tiles."""
    wanted = options.templates and options.fusion and options.scales and not options.stable
    if not wanted or not may_hold_programs(graph) or not registry.programs():  # in this order: the last one loads templates
        return []
    kinds = {options.device(graph, name).kind for name in graph.buffers}
    places = recognised(graph, [program for kind in sorted(kinds) for program in registry.programs(kind)])
    return [place for place in places if not place.is_forbidden(options.demands)]


def _schedule(graph: ir.Graph, options: Options) -> Schedule:
    """The schedule of a graph whose programs are operations.

    Contractions are offered to templates first. Those whose kernel, with all that was fused into it, is estimated to be slower
    than the library call and separate kernels go back to the library, and the graph is scheduled anew around the calls. So it
    is when the tile chosen for a product says into how many parts its rows are reduced, and when its sums are to be cut. Where
    a demand fails because a product's kernel has what another one should have, there are no templates."""
    freeze_layouts(graph)
    graph.nodes = usable(graph, options.may_fuse_calls(graph), options.demands)
    offered = _offered(graph, options)
    forget_first_sizes(graph, [n for n in graph.nodes if isinstance(n, ir.Product) and offered.intersection(ir.outs(n))])
    try:
        with remembering():
            return _around_products(graph, offered, options)
    except errors.FusionRequired as failure:
        if not offered:
            raise
        try:
            return _around_products(graph, frozenset(), options)
        except errors.FusionRequired:
            raise failure from None


def _around_products(graph: ir.Graph, offered: frozenset[str], options: Options) -> Schedule:
    """A schedule in which templates compute those of the contractions in `offered` for which that is faster."""
    demanded = frozenset(name for d in options.demands if d.wanted for name in (d.producer, d.consumer))
    known = _Known(offered, tiles=Tiles(demanded=demanded, rows=_with_rows(graph, offered, options)))
    refusals: list[Verdict] = []
    answers: Answers = {}
    settled: Answers = {}  # before the trial
    trial: Trial | None = None
    while True:
        apart = frozenset[str]() if options.stable else kept_apart(answers)
        result = _attempt(graph, known, options, apart)
        refused = left_apart(result) or stored(result, known.tiles) or rows_apart(result, result.extra["held"]) or alone(result)
        refused = refused or left_alone(result, result.extra["slices"])
        if not refused:
            if options.siblings and options.joint:
                join(result, _joining(graph, known.tiles, options))
            if options.oracle is not None and options.only is None and options.oracle.is_worth_asking:
                answers |= ask(options.oracle, result, known.tiles, lambda out: options.device(graph, out))
        copies = {} if refused else _copies(result, known.tiles, options, answers, _read_by_prologue)
        cuts = {} if refused or copies else _cuts(result, known.tiles, options, answers)
        copies = copies if refused or cuts or copies else _copies(result, known.tiles, options, answers)
        refused = refused or ({} if cuts or copies else _choose(result, known.tiles, options, answers))
        blocks = {} if refused or cuts or copies else _blocks(result, options)
        if not (refused or cuts or copies or blocks):
            pricing = _pricing(graph, known.tiles, options, answers)
            if trial is None:
                trial = trial_of(result, _triable(graph, offered, options), known.tiles, pricing)
                settled, refusals = answers, [*refusals, *trial.refusals]
                if trial.around:
                    known = replace(known, tiles=replace(known.tiles, twice=frozenset(trial.around)))
                    answers = {out: answer for out, answer in answers.items() if out not in trial.around}
                    continue
            refused = judged(result, trial, known.tiles, pricing)
            if not refused:
                result.verdicts += operand_padding.said(known.tiles.copies, graph, _written(result))
                return _finished(result, refusals, options)
        changed = {verdict.producer for verdict in refused_updates(refused).values()}
        answers = {
            out: one for out, one in answers.items()
            if out not in changed and refused.keys().isdisjoint((refusal_of(out), sums_refusal(out)))
        }  # fmt: skip
        answers |= {out: answer for out, answer in settled.items() if second_of(out) in refused}
        refusals += refused.values()
        known = known.after(refused, blocks, cuts, copies)
        if trial is not None and not known.tiles.twice:
            return _finished(trial.given_up(), refusals, options)


def _written(plan: Schedule) -> set[str]:
    return {out for step in plan.steps for out in writes(step)}


def _finished(plan: Schedule, refusals: list[Verdict], options: Options) -> Schedule:
    plan.verdicts[:0] = [*(options.oracle.verdicts() if options.oracle else ()), *refusals]
    plan.verdicts += in_pieces(plan) + slice_verdicts(plan, plan.extra["slices"])
    provide_workspaces(plan, lambda out: options.device(plan.graph, out))
    return plan_memory(plan)


@dataclass(frozen=True, slots=True)
class _Known:
    """What earlier attempts at a schedule have found out: products that templates may still compute, by their first results,
    those among them that no template makes together with another one, and reductions on tiles."""

    offered: frozenset[str]
    single: frozenset[str] = frozenset()
    tiles: Tiles = field(default_factory=Tiles)
    apart: Mapping[str, Verdict] = field(default_factory=dict)  # updates that no product's kernel has, by their results

    def after(
        self, refused: Mapping[str, Verdict], blocks: Mapping[str, int], cuts: Mapping[str, int], copies: Mapping[str, str]
    ) -> _Known:
        """With what one more attempt has found out. Raises NoProgress where that is nothing: attempts would go on forever."""
        products = refused.keys() & self.offered  # and not what else of a product may be refused, by a name of its own
        apart = {name for name in products if refused[name].reason is Reason.TWO_PRODUCTS}
        gone = set(refused) - apart
        cuts = {**self.tiles.cuts, **cuts}
        rows = frozenset(out for out in self.tiles.rows if refusal_of(out) not in gone)
        twice = frozenset(out for out in self.tiles.twice if second_of(out) not in gone)
        copies = {**self.tiles.copies, **copies}
        tiles = Tiles({**self.tiles.blocks, **blocks}, self.tiles.apart | gone, self.tiles.demanded, cuts, rows, twice, copies)
        made = _Known(self.offered - gone, self.single | apart, tiles, {**self.apart, **refused_updates(refused)})
        if made == self:
            raise errors.NoProgress(refused=", ".join(refused) or "nothing")
        return made


def _offered(graph: ir.Graph, options: Options) -> frozenset[str]:
    """Results of the contractions that templates may compute."""
    if not options.templates:
        return frozenset()
    outs = (ir.outs(n)[0] for n in graph.nodes if _offerable(n))
    return frozenset(out for out in outs if registry.every(options.device(graph, out).kind))


def _with_rows(graph: ir.Graph, offered: frozenset[str], options: Options) -> frozenset[str]:
    """Products whose tiles may hold whole rows: in what order a row is added up there depends on the tile, and C++ has none
    as long."""
    if options.stable:
        return frozenset()
    return frozenset(out for out in offered if options.device(graph, out).kind == "cuda")


def _triable(graph: ir.Graph, offered: frozenset[str], options: Options) -> frozenset[str]:
    """Products that may be computed twice: what each computation adds up depends on its tile."""
    return _with_rows(graph, offered, options) if options.fusion and options.twice and options.only is None else frozenset()


def _offerable(node: ir.Node) -> bool:
    if isinstance(node, ir.Contraction):
        return node.operands is not None
    return isinstance(node, ir.Operation) and bool(ir.outs(node))


def _cuts(plan: Schedule, tiles: Tiles, options: Options, answers: Answers) -> dict[str, int]:
    """Into how many parts to cut the sums of products that were not asked yet, where some are worth cutting."""
    sizes = Sizes(plan.graph.size_hints)
    found: dict[str, int] = {}
    asked = {*tiles.cuts, *(partial_of(plan.graph, out) for out in tiles.cuts)}
    for kernel in (step for step in plan.steps if isinstance(step, Kernel) and step.contracts):
        out = product_of(kernel)
        device = options.device(plan.graph, out)
        if out in asked or whole_of(plan.graph, out) != out or not may_cut(kernel, sizes, device):
            continue
        takers = problems(kernel, plan.graph, device, None)[0]
        if options.only is not None:
            found[out] = options.only.parts
        elif options.stable:  # a rule of the sizes and the machine
            found[out] = next(iter(possible_parts(takers, kernel)), 1)
        else:
            known = answers.get(out, {}).get(place({}))
            found[out] = parts_of(takers, kernel) if known is None else known.parts
    return found if any(parts > 1 for parts in found.values()) else {}


def _copies(
    plan: Schedule, tiles: Tiles, options: Options, answers: Answers, wanted: Callable[[Kernel], object] = bool
) -> dict[str, str]:
    """Which operands to copy for matmuls that were not asked yet, where some are worth copying, of the kernels that are
    `wanted`. Whether an operand is computed comes first: into how many parts a sum is cut depends on that."""
    if not options.copies:
        return {}
    found: dict[str, str] = {}
    twice = computations(plan.graph, tiles)
    for kernel in (one for step in plan.kernels for one in members(step) if one.contracts and wanted(one)):
        out = product_of(kernel)
        if out in tiles.copies or out in twice or tiles.cuts.get(out, 1) > 1:
            continue
        if options.only is not None:
            found[out] = options.only.copies
            continue
        known = None if options.stable else answers.get(out, {}).get(place({}))
        device = options.device(plan.graph, out)
        estimated = operand_padding.best_copies
        found[out] = estimated(kernel, plan.graph, device, not options.stable) if known is None else known.copies
    return found if any(found.values()) else {}


def _choose(plan: Schedule, tiles: Tiles, options: Options, answers: Answers) -> dict[str, Verdict]:
    """Gives every product its template; the results of those that are better off in the library, with the reason. Where no
    template takes a product with the reductions on its tiles, these are refused, by their first results. No library call makes
    the parts of a sum that is cut."""
    refused: dict[str, Verdict] = {}
    whole, twice = {partial_of(plan.graph, out): out for out in tiles.cuts}, computations(plan.graph, tiles)
    for k, step in enumerate(plan.steps):
        if isinstance(step, Batch) and step.members[0].contracts:
            refused |= _updates_of_joint(step, plan.graph, options)
        if not isinstance(step, Kernel) or not step.contracts:
            continue
        out = product_of(step)
        device = options.device(plan.graph, out)
        vendor, known = out not in whole and out not in twice, answers.get(whole.get(out, out), {})
        given = Given(options.demands, options.only, vendor, known, options.stable)
        chosen = choose_template(step, plan.graph, device, given)
        updates_apart = why_updates_apart(step, chosen, plan.graph, device, given)
        apart = why_apart(step, chosen, plan.graph, device, given)
        if updates_apart:
            refused |= updates_apart
        elif apart is not None:
            refused[sums_refusal(out)] = apart
        elif isinstance(chosen, Kernel):
            plan.steps[k] = chosen
            plan.verdicts.append(_chosen(out, chosen, given.answers))
        elif out in twice:
            refused[second_of(twice[out])] = replace(chosen, producer=twice[out], outcome=Outcome.STORED)
        else:
            refused |= _without(step, chosen, plan) or {whole.get(out, out): chosen}
    raise_not_taken(plan.graph, refused)
    return _readers_first(refused, plan)


def _readers_first(refused: dict[str, Verdict], plan: Schedule) -> dict[str, Verdict]:
    """Without matmuls that another refused one reads through its prologue: what was that prologue may become their epilogue,
    with which they may be faster than the library."""
    kernels = {product_of(step): step for step in plan.steps if isinstance(step, Kernel) and step.contracts}
    read = {name: _read_by_prologue(kernels[name]) for name in refused if name in kernels}
    waiting = {name for name in refused if any(name in found for other, found in read.items() if other != name)}
    return {name: verdict for name, verdict in refused.items() if name not in waiting}


def _read_by_prologue(kernel: Kernel) -> set[str]:
    """Buffers that operands of a kernel's matmuls are computed from."""
    values = [v for s in kernel.statements if s.kind == "contraction" for v in (s.value, *s.factors)]
    return {load.attr[0] for load in vs.loads([v for v in values if v.op != "load" or v.args])}


def _updates_of_joint(step: Batch, graph: ir.Graph, options: Options) -> dict[str, Verdict]:
    """Updates that products of one kernel, which have their template, had better do without."""
    given = Given(options.demands, options.only, stable=options.stable)
    found: dict[str, Verdict] = {}
    for kernel in step.members:
        found |= why_updates_apart(kernel, kernel, graph, options.device(graph, product_of(kernel)), given)
    return found


def _without(step: Kernel, chosen: Verdict, plan: Schedule) -> dict[str, Verdict]:
    """What a product that no template has as it is should do without, before the library has it."""
    out = product_of(step)
    if (product := whole_of(plan.graph, out)) != out:
        return {pieces_refusal(product): replace(chosen, producer=product, outcome=Outcome.UNPROFITABLE)}
    if rows := rows_in(step, plan.extra["held"]):
        return {refusal_of(product): _not_whole(product, chosen) for product in rows}
    if chosen.reason is Reason.NO_TEMPLATE and partials(step):
        reason = Reason.NOT_IN_TILES
        return {s.outs[0]: Verdict(out, s.outs[0], Outcome.ILLEGAL, reason, detail=chosen.detail) for s in partials(step)}
    products = products_of(step)
    return {one: replace(chosen, producer=one, reason=Reason.TWO_PRODUCTS) for one in products} if len(products) > 1 else {}


def _not_whole(product: str, chosen: Verdict) -> Verdict:
    """The refusal of whole rows, where a template without them may still be better than the library."""
    if chosen.reason is Reason.NO_TEMPLATE:
        return Verdict(product, "", Outcome.ILLEGAL, Reason.NOT_WHOLE, detail=chosen.detail)
    return replace(chosen, producer=product, outcome=Outcome.UNPROFITABLE)


def _chosen(out: str, kernel: Kernel, answers: Mapping[Place, Answer]) -> Verdict:
    """With the times that were measured, where sizes are known."""
    known = answers.get(place({}))
    times = () if known is None else (known.seconds * 1e6, known.library_seconds * 1e6)
    detail = str(kernel.by_size or kernel.choice)
    return Verdict(out, "", Outcome.CHOSEN, Reason.TEMPLATE, detail=detail, measured=times)


def _joining(graph: ir.Graph, tiles: Tiles, options: Options) -> Joining:
    pricing = _pricing(graph, tiles, options, {})
    return Joining(pricing.device, pricing.best, options.demands, options.only)


def _pricing(graph: ir.Graph, tiles: Tiles, options: Options, answers: Answers) -> Pricing:
    apart = {*(partial_of(graph, out) for out in tiles.cuts), *computations(graph, tiles)}

    def device(out: str) -> Device:
        return options.device(graph, out)

    def alone(kernel: Kernel) -> Best | None:
        out = product_of(kernel)
        given = Given(vendor=out not in apart, answers=answers.get(out, {}), stable=options.stable)
        return best(problems(kernel, graph, device(out), None)[0], given)

    return Pricing(device, alone, options.demands)


def _blocks(plan: Schedule, options: Options) -> dict[str, int]:
    """Points of the parts into which the chosen tiles cut what products reduce, where that was not known."""
    found: dict[str, int] = {}
    for kernel in (one for step in plan.kernels for one in members(step)):
        if any(s.block == 0 for s in partials(kernel)):
            found |= part_blocks(kernel, plan.graph, options.device(plan.graph, product_of(kernel)))
    return found


def _attempt(graph: ir.Graph, known: _Known, options: Options, apart: frozenset[str]) -> Schedule:
    """A schedule without a memory plan, in which templates are to compute what they may; the library computes the products in
    `apart` without what follows."""
    taken = known.offered | known.tiles.twice
    how = Operands(options.demands, options.prologues, options.scales)
    nodes = graph.nodes
    refused: list[Verdict] = []
    if options.fusion:
        graph.nodes, refused = in_slices(graph, taken, known.tiles)
    sliced = tuple(n.out for n in nodes if isinstance(n, ir.Pointwise) and graph.buffers[n.out].parts)
    try:
        offered, held, scaled = offer(graph, taken, known.tiles, how)
        graph.nodes = with_fused_calls(offered, apart)
        result = _scheduled(graph, options, known, held)
    finally:
        made, graph.nodes = graph.nodes, nodes
    result.verdicts += [*scaled, *verdicts(made, graph), *refused]
    result.extra["slices"] = sliced
    return result


def _raise_unmet(unmet: Iterable[tuple[FusionDemand, errors.FusionRequired]], steps: list[Step]) -> None:
    """Raises for what the user wants in one kernel and has not got, now that all that moves into kernels has moved."""
    for demand, missing in unmet:
        if not any(isinstance(step, Kernel) and demanded(step, (demand,)) for step in steps):
            raise missing


def _scheduled(graph: ir.Graph, options: Options, known: _Known, held: Mapping[str, str]) -> Schedule:
    after = edges(graph)
    order = topological(after, graph.name)
    position = {node: k for k, node in enumerate(order)}
    groups = [_group(graph, graph.nodes[n], k) for k, n in enumerate(order)]
    sizes = Sizes(graph.size_hints)
    outputs = frozenset(o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg))
    limits = {device: cost.LIMITS[options.target(device)] for device in {g.device for g in groups}}
    unordered = frozenset(device for device in limits if options.target(device) == "triton")
    fuser = Fuser(
        graph, groups, sizes, outputs, limits, options.fusion, options.demands, known.single, options.siblings, held, unordered,
        known.apart,
    )  # fmt: skip
    defined_once((name for node in graph.nodes for name in _defines(graph, node)), "schedule")
    for group in groups:
        for name in group.writes:
            fuser.producer[name] = group
        for name in group.reads:
            fuser.readers.setdefault(name, {})[group.serial] = group
    for n, targets in enumerate(after):
        source = groups[position[n]]
        fuser.after[source.serial] = {groups[position[t]] for t in targets}
        for target in fuser.after[source.serial]:
            fuser.before.setdefault(target.serial, set()).add(source)
    alive = fuser.run()
    verdicts = fuser.verdicts
    shared = _storage_shared(graph)
    steps = [_step(g, fuser, outputs, shared, verdicts, options) for g in _ordered(alive, fuser)]
    steps = [step for step in steps if not _is_dead(step)]
    if options.fusion and options.siblings:
        steps = carry_sums(steps, Beside(graph, known.tiles.apart, options.demands, options.stable), verdicts)
    if options.fusion:
        setting = Setting(graph, sizes, options.gpu, outputs | shared, options.demands)
        steps = carry_columns(steps, setting, verdicts)
    _raise_unmet(fuser.unmet, steps)
    steps = _distinct_names(_split(steps, graph, sizes, options.gpu))
    if options.fusion and options.siblings:
        steps = batch(steps, graph, options.demands, verdicts)
    result = Schedule(graph, steps, verdicts)
    result.local = _locals(graph, steps)
    result.extra["held"] = held
    result.extra["call_results"] = frozenset(
        o
        for g in alive
        if isinstance(g.call, ir.Extern)
        for o in ir.outs(g.call)  # may alias what they were given
    )
    return result


def _defines(graph: ir.Graph, node: ir.Node) -> tuple[str, ...]:
    """The names that a node gives to buffers, those of what never leaves registers included."""
    mine = isinstance(node, ir.Product) and node.vendor is None
    return (*ir.outs(node), *(accumulators(graph, node) if mine and isinstance(node, ir.Product) else ()))


def _group(graph: ir.Graph, node: ir.Node, position: int) -> Group:
    group = Group(position, first=position, last=position, rank=position)
    if ir.call_of(node) is not None:
        group.call = node
    else:
        group.outer, group.inner, group.members = once((node, position), lambda: _members(graph, node, position))
        group.device = str(graph.buffers[ir.outs(node)[0]].device)
    return group


def _members(graph: ir.Graph, node: ir.Node, position: int) -> tuple[tuple[ix.Var, ...], tuple[ix.Var, ...], Members]:
    """The items of one node, and the loops that they are written over. Fusion makes others of them and changes none."""
    assert not isinstance(node, ir.Extern | ir.Attention)
    items = items_of(node, position, graph) if isinstance(node, ir.Product) else [make_item(node, position)]
    renamed: dict[ix.Atom, ix.Expr] = {}
    outer = _renamed("x", items[0].outer, renamed)
    inner = _renamed("y", items[0].inner, renamed)
    if items[0].inner and not inner:
        inner = (ix.var("y0", 1),)
    return outer, inner, Members.of([item.substituted(renamed, outer, inner if item.inner else ()) for item in items])


def _renamed(letter: str, loops: tuple[ix.Var, ...], renamed: dict[ix.Atom, ix.Expr]) -> tuple[ix.Var, ...]:
    kept: list[ix.Var] = []
    for v in loops:
        if v.extent == 1:
            renamed[v] = ix.ZERO
        else:
            kept.append(ix.var(f"{letter}{len(kept)}", v.extent))
            renamed[v] = kept[-1].expr()
    return tuple(kept)


def _ordered(groups: list[Group], fuser: Fuser) -> list[Group]:
    """A topological order of the fused groups, close to program order."""
    numbers = {g.serial: k for k, g in enumerate(sorted(groups, key=lambda g: g.last))}
    by_number = sorted(groups, key=lambda g: g.last)
    after = [{numbers[t.serial] for t in fuser.after.get(g.serial, ()) if t.serial in numbers} for g in by_number]
    return [by_number[k] for k in topological(after, fuser.graph.name)]


def _step(
    group: Group, fuser: Fuser, outputs: frozenset[str], shared: frozenset[str], verdicts: list[Verdict], options: Options
) -> Step:
    if group.call is not None:
        node = group.call
        call = ir.call_of(node)
        assert call is not None
        reason = Reason.LIBRARY if call is not node or len(call.origin.operators) > 1 else Reason.NO_LOWERING
        verdicts.append(Verdict(group.name, str(call.target), Outcome.EXTERN, reason, detail=call.reason))
        return Call(call)
    needed = frozenset(
        name for name in group.writes
        if name in outputs or any(r is not group for r in fuser.readers.get(name, {}).values()) or name in shared
    )  # fmt: skip
    return make_kernel(group, fuser.sizes, needed, verdicts, options.target(group.device))


def _is_dead(step: Step) -> bool:
    """Whether nobody reads what a kernel makes: a rule may store more than the graph then needs."""
    return isinstance(step, Kernel) and not any(any(s.stored) for s in step.statements)


def _split(steps: list[Step], graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> list[Step]:
    """Few long rows of a kernel shared among the programs of a GPU. What adds partial sums has had its share of that."""
    partial = {o for step in steps if isinstance(step, Kernel) for s in step.statements if s.kind == "column" for o in s.outs}
    out: list[Step] = []
    for step in steps:
        divisible = isinstance(step, Kernel) and step.target == "triton" and not step.contracts and not partial & reads(step)
        out += split_reduction(step, graph, sizes, gpu) if isinstance(step, Kernel) and divisible else [step]
    return out


def _storage_shared(graph: ir.Graph) -> frozenset[str]:
    """Buffers whose storage has another name as well: memory whether or not anybody reads them by this one."""
    aliases = {b.name: b.alias_of for b in graph.buffers.values() if b.alias_of is not None}
    return frozenset((*aliases, *aliases.values()))


def _distinct_names(steps: list[Step]) -> list[Step]:
    """Kernels with the same operators get a number, with which none has the name of another one."""
    taken: set[str] = set()
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Kernel):
            names = itertools.chain((step.name,), (f"{step.name}_{number}" for number in itertools.count(2)))
            step = replace(step, name=next(name for name in names if name not in taken))
            taken.add(step.name)
        out.append(step)
    return out


def _locals(graph: ir.Graph, steps: list[Step]) -> frozenset[str]:
    """Buffers that never become memory."""
    found: set[str] = set()
    for step in steps:
        if not isinstance(step, Call):
            for s in step.statements:
                found.update(o for o, stored in zip(s.outs, s.stored, strict=True) if not stored)
    return frozenset(found)


__all__ = ["Options", "overwritten", "schedule"]
