"""Walks an FX graph of aten calls and builds the loop IR: `lower` is the stage's one public function."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from kgen import errors, failures
from kgen.capture.operators import operator_name, origin_of
from kgen.capture.symbols import SymbolTable
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.nodes import Buffer, GraphInput
from kgen.lowering import fallback, unbacked
from kgen.lowering.builder import Builder
from kgen.lowering.closed_form import in_runs
from kgen.lowering.empty_buffers import rule_out_zeros
from kgen.lowering.families import CONTRACTIONS, RULES, VIEWS
from kgen.lowering.few_reads import recompute_few_reads
from kgen.lowering.fused_calls import note_fused_calls
from kgen.lowering.narrow_values import store_narrow
from kgen.lowering.operation import OperatorAxes, lower_operator
from kgen.lowering.part_readers import apply_to_parts
from kgen.lowering.results import Results, owners_of_results
from kgen.lowering.row_values import FEW_REPEATS, MIN_REPEATS, remaining_cost, row_cost, stores_few, with_row_values_stored
from kgen.lowering.short_axes import unroll_short_axes
from kgen.lowering.stencils import recompute_in_stencils
from kgen.lowering.summed_scatters import add_to_sums
from kgen.lowering.table import Rule
from kgen.lowering.tensor import Tensor, axes, number_of, reshape, rounded, unsupported
from kgen.lowering.unbacked import UNBACKED, note_bindings
from kgen.lowering.unread_positions import drop_unread_positions

# A value used by several consumers is stored once it costs more than this (in additions); the scheduler may still keep it in
# registers. Below it, computing it again is cheaper than a trip through memory.
CHEAP = 6
# The same on a GPU, of a large tensor that reads one of its size, and otherwise rows and columns: below the cost of an
# exponential. A float32 is twice the bytes: an element of a softmax takes less time than a trip through memory, unless a reader
# would compute it several times.
CHEAP_ON_GPU, CHEAP_FLOAT32_ON_GPU, LARGE = 14, 24, 1 << 20
# What functions cost less in a kernel that a GPU takes through its own ones: those of values that end in 16 bits.
FAST_ON_GPU = {"exp": -12, "exp2": -13, "sigmoid": -13, "tanh": -12, "log": -9, "log2": -9, "erf": -8}
# And on a CPU, of a tensor larger than a core's cache that reads one of its size: an element that is stored and read moves 12
# bytes, which takes a core as long as some tens of operations on lanes.
CHEAP_ON_CPU = 14
# Numbers of a constant list that are looked at, to see where they are evenly spaced.
LONGEST_LIST = 64
# What reads a tensor that is a list in the program: nobody else has that tensor.
LIFTS = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")
# Operators behind a value that are looked at for one that would compute its elements several times.
STEPS = 8
# Operations that belong to a row, which each of its elements may compute again: more are stored for the row.
CHEAP_OF_ROWS = 12
# Of these, what is stored whoever reads it: where all elements together would compute so much, tens of microseconds of a GPU.
DEAR_OF_ROWS, DEAR_WORK = 32, 1 << 29
# Operators that may read what each of them computes again.
MOST_READERS = 3
# Operators that read elements at positions from data, and of how many elements they may read one.
GATHERS, FEW_GATHERED = ("aten.gather.default", "aten.index.Tensor"), 16
# Elements of a contraction's result for each of what they share, from which on a copy of that in rows is worth a kernel.
FEWEST_SHARING = 4
# Where each element is read so often at most, readers compute what they read, whatever it costs.
FEW_TIMES = 0.5
# A value that reads this many buffers or has this many operations is stored whatever its users, to bound code size.
MAX_LOADS = 24
MAX_COST = 600
# A value made of loop indices alone is stored above this cost only: as an index it is understood, read from memory it is not.
CHEAP_FROM_INDICES = 60


@dataclass(slots=True)
class LoweringContext:
    """What `lower` needs besides the graph: `in_inputs` are the positions of outputs that the caller gets as views of inputs,
    `flexible_results` of those that may have any dense layout (what is saved for a backward graph), `forced` operator names
    that run in eager, `failed` nodes that do, with the reason, `static_inputs` positions of parameters and buffers,
    `frozen_inputs` of those whose elements stay as they are."""

    name: str = "graph"
    numerics: str = "fast"
    shape_env: Any = None
    in_inputs: frozenset[int] = frozenset()
    forced: frozenset[str] = frozenset()
    static_inputs: frozenset[int] = field(default_factory=frozenset)
    frozen_inputs: frozenset[int] = field(default_factory=frozenset)
    gpu_everywhere: bool = False  # the CPU's tensors stand for a GPU's
    operators: Mapping[str, tuple[OperatorAxes, ...]] = field(default_factory=dict)  # those that templates implement
    inlining: bool = True  # whether an operator may be computed where its result is read
    failed: Mapping[str, str] = field(default_factory=dict)
    top_k: str = "auto"  # who finds the largest elements of rows: kernels, the library, or who is faster
    deterministic: bool = False  # `torch.use_deterministic_algorithms`
    flexible_results: frozenset[int] = field(default_factory=frozenset)


def lower(gm: GraphModule, context: LoweringContext) -> ir.Graph:
    """The loop IR of an aten graph. Operators without a rule become counted externs."""
    return _Lowering(gm, context).run()


class _Lowering:
    def __init__(self, gm: GraphModule, context: LoweringContext) -> None:
        self.gm = gm
        self.context = context
        self.symbols = SymbolTable(context.shape_env)
        self.builder = Builder(context.name, context.numerics)
        self.builder.symbols = self.symbols
        self.builder.top_k, self.builder.gpu_everywhere = context.top_k, context.gpu_everywhere
        self.env = self.builder.env  # a write has to find the lazy readers of what it overwrites
        self.position = 0
        self.nested: dict[Expr, int] = {}  # nested ints, and where they are among the arguments
        self.on_gpu: set[vs.Value] = set()  # values that kernels on a GPU can compute
        self.multiplied: dict[Node, bool] = {}  # whether a contraction reads the node
        self.narrower: dict[tuple[Node, int], list[Node]] = {}  # what a node reads with elements of fewer bytes than these
        self.results = Results(self.builder, context.in_inputs, context.flexible_results, origin_of)

    def run(self) -> ir.Graph:
        self.builder.owners = owners_of_results(self.gm)
        for node in self.gm.graph.nodes:
            self.builder.current = node
            self.builder.origin = origin_of(node)
            value = meta_value(node)
            if node.op == "call_function" and _may_bind(node.target):  # before strides have the symbols, too
                note_bindings(self.builder, node)
            self.builder.result_strides = self.symbols.sizes(value.stride()) if _is_strided(value) else None
            getattr(self, node.op)(node)
        graph = self.builder.graph
        if len(graph.nodes) > 1:  # one node reads what it is given
            unroll_short_axes(graph, self.builder.fresh)
            if self.context.inlining:
                apply_to_parts(graph, self.builder.fresh)
                recompute_few_reads(graph, self.builder.on_gpu)
                store_narrow(graph, self.builder.fresh, self.builder.on_gpu)
                recompute_in_stencils(graph, self.builder.on_gpu)
                add_to_sums(graph, self.builder.on_gpu)
        if any(isinstance(node, ir.Reduction) and len(node.outs) > 1 for node in graph.nodes):
            drop_unread_positions(graph)
        if any(isinstance(node, ir.Contraction) for node in graph.nodes):
            note_fused_calls(self.builder)
        graph.size_hints, graph.derived = self.symbols.size_hints(), dict(self.symbols.derived)
        if any(not size.lo for size in self.symbols.sympy_of):
            rule_out_zeros(graph, self.symbols)
        return graph

    # ---- node kinds -------------------------------------------------------------------------------------------------

    def placeholder(self, node: Node) -> None:
        value = meta_value(node)
        static, frozen = (self.position in some for some in (self.context.static_inputs, self.context.frozen_inputs))
        self.position += 1
        inputs = self.builder.graph.inputs
        if isinstance(value, torch.Tensor):
            buffer = self._input_buffer(node.name, value, "input")
            inputs.append(GraphInput(buffer.name, static=static, frozen=frozen))
            self.env[node] = self.builder.load(buffer)
        elif isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            expr = self.env[node] = self.symbols.expr(value)
            inputs.append(self._integer_input(expr, value))
        else:
            inputs.append(GraphInput())
            self.env[node] = value

    def _integer_input(self, expr: Expr, value: Any) -> GraphInput:
        if is_nested_int(value):
            self.nested[expr] = self.position - 1
            return GraphInput()
        atom = expr.atom()
        return GraphInput(symbol=atom if isinstance(atom, ix.Size) else None, expr=expr)

    def _input_buffer(self, name: str, value: torch.Tensor, kind: str) -> Buffer:
        sizes, strides = self.symbols.sizes(value.shape), self.symbols.sizes(value.stride()) if _is_strided(value) else None
        made = Buffer(self.builder.fresh(name), value.dtype, value.device, sizes, strides, 0, kind)
        self.builder.graph.buffers[made.name] = made
        return made

    def get_attr(self, node: Node) -> None:
        owner: Any = self.gm
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if not isinstance(owner, torch.Tensor):
            self.env[node] = owner  # a submodule: the body of a higher-order operator
            return
        if owner.numel() == 1 and owner.device.type == "cpu" and not owner.is_complex() and type(owner) is torch.Tensor:
            literal = vs.const(owner.item(), owner.dtype)
            sizes = self.symbols.sizes(owner.shape)
            self.env[node] = Tensor(sizes, owner.dtype, owner.device, literal)
            return
        if (listed := _listed(owner, self.symbols.sizes(owner.shape))) is not None:
            self.env[node] = listed
            return
        buffer = self._input_buffer(node.name, owner, "constant")
        self.builder.graph.constants[buffer.name] = owner.detach()
        if all(operator_name(user.target) in LIFTS for user in node.users):
            self.builder.literals.add(buffer.name)
        self.env[node] = self.builder.load(buffer)

    def call_function(self, node: Node) -> None:
        value = meta_value(node)
        if node.target is operator.getitem:
            source = self.env[node.args[0]]  # type: ignore[index]
            self.env[node] = source[node.args[1]]
            return
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and not node.meta.get(UNBACKED):
            self.env[node] = fallback.symbolic(self.symbols, value)
            return
        args = torch.fx.map_arg(node.args, self._lookup)
        kwargs = torch.fx.map_arg(node.kwargs, self._lookup)
        args, kwargs = self._symbols_in(args), self._symbols_in(kwargs)
        result = self._apply(node, args, kwargs)
        if not node.meta.get(UNBACKED):
            self.env[node] = self._settle(node, result)
            return
        self.env[node] = self._settle(node, unbacked.define(self.builder, node, result))
        unbacked.check_bound(self.builder, node)

    def call_module(self, node: Node) -> None:
        raise errors.LoweringFailed(
            operator=str(node.target), cause="module calls do not occur in aten graphs", line=self.builder.origin.line
        )

    call_method = call_module

    def output(self, node: Node) -> None:
        results = node.args[0]
        for position, result in enumerate(results if isinstance(results, list | tuple) else (results,)):
            self.builder.graph.outputs.append(self._output(result, position))

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _lookup(self, node: Node) -> Any:
        return self.env[node]

    def _symbols_in(self, tree: Any) -> Any:
        """SymInts that FX stores inline (as constants of the graph) become expressions."""
        if isinstance(tree, torch.SymInt | torch.SymFloat | torch.SymBool):
            return fallback.symbolic(self.symbols, tree)
        if isinstance(tree, list | tuple):
            return (
                type(tree)(self._symbols_in(t) for t in tree)
                if type(tree) in (list, tuple)
                else tuple(self._symbols_in(t) for t in tree)
            )
        if isinstance(tree, dict):
            return {k: self._symbols_in(v) for k, v in tree.items()}
        return tree

    def _apply(self, node: Node, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = operator_name(node.target)
        rule = rule_of(RULES, name) or self._template_rule(node)
        forced = name in self.context.forced or name.rpartition(".")[0] in self.context.forced
        reason = "forced by options" if forced else "no lowering" if rule is None else _unsupported(node)
        reason = self.context.failed.get(node.name, reason)
        if rule is None or reason:
            return fallback.extern(self.builder, node, args, kwargs, reason)
        mark = len(self.builder.graph.nodes)
        try:
            result = self._by_rule(rule, node, args, kwargs)
        except fallback.Refused as refusal:  # the rule does not cover these arguments
            self.builder.drop_nodes(mark)
            return fallback.extern(self.builder, node, args, kwargs, str(refusal))
        except failures.NOT_OURS:
            raise
        except errors.KgenError as failure:
            failure.details.setdefault("aten_node", node.name)
            raise
        except Exception as cause:
            if _has_symbolic_float((args, kwargs)):  # the rule wants a Python number
                self.builder.drop_nodes(mark)
                return fallback.extern(self.builder, node, args, kwargs, "a number computed from sizes")
            text = f"{type(cause).__name__}: {cause}"
            raise errors.LoweringFailed(
                operator=name, cause=text, line=self.builder.origin.line, aten_node=node.name
            ) from cause
        return result

    def _template_rule(self, node: Node) -> Any:
        """The rule of an operator that some template implements."""
        schema = getattr(node.target, "_schema", None)
        axes = None if schema is None else self.context.operators.get(schema.name)
        return None if axes is None else lambda b, *args, **kwargs: lower_operator(b, axes, args, kwargs)

    def _by_rule(self, rule: Any, node: Node, args: Any, kwargs: Any) -> Any:
        """What the rule makes of the arguments, all of them on the device of the result."""
        first = next((v for v in tree_leaves(meta_value(node)) if isinstance(v, torch.Tensor)), None)
        device = first.device if first is not None else torch.device("cpu")
        mark = len(self.builder.graph.nodes)
        if isinstance(node.target, torch._ops.OpOverload) and node.target is not torch.ops.aten._to_copy.default:
            args, kwargs = self._moved(args, device), self._moved(kwargs, device)
        if _is_conversion(node):
            args = (self._in_memory(args[0]), *args[1:])
        if self.builder.on_gpu(device) and self._is_of_contraction(node):
            args = self._read_along_rows(node, args)
        result = rule(self.builder, *args, **kwargs)
        if device.type == "cuda" or self.context.gpu_everywhere:
            fallback.refuse_on_gpu(self.builder.graph, self.builder.graph.nodes[mark:], self.on_gpu, self.context.deterministic)
            fallback.refuse_values_on_gpu((t.value for t in tree_leaves(result) if isinstance(t, Tensor)), self.on_gpu)
        return result

    def _is_of_contraction(self, node: Node) -> bool:
        """Whether it is elementwise work on a contraction's large result, of some arguments that are not made of that."""
        if not self.context.inlining or not _is_pointwise(node) or len(node.all_input_nodes) < 2 or _elements(node) < LARGE:
            return False
        return any(_is_result_of(one, node) for one in node.all_input_nodes)

    def _read_along_rows(self, node: Node, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments, of which those that many elements share are read from copies with neighbours of a row side by side. A
        template reads each tile of them; across rows, as a mask with its batch innermost is stored, each load would bring one
        element of each sector."""
        elements = _elements(node)

        def copied(tensor: Any, given: Any) -> Any:
            if not isinstance(tensor, Tensor) or not isinstance(given, Node) or _is_result_of(given, node):
                return tensor
            return self.builder.read_along_rows(tensor, most=elements // FEWEST_SHARING)

        return tuple(copied(tensor, given) for tensor, given in zip(args, node.args, strict=True))

    def _moved(self, tree: Any, device: torch.device) -> Any:
        """Tensors of other devices copied to this one, as torch does with a number in a CPU tensor or an index from there."""
        if isinstance(tree, Tensor) and tree.device != device and not tree.weak:
            if not vs.loads([tree.value]):
                return replace(tree, device=device)
            if (constant := self.builder.constant_on(tree, device)) is not None:
                return constant
            strides = ix.contiguous_strides(tree.sizes)
            spec = (tree.sizes, tree.dtype, device, strides)
            options = {"device": device, "memory_format": torch.contiguous_format}
            copied = self.builder.extern(torch.ops.aten._to_copy.default, (tree,), options, [spec], "copy between devices")
            return copied[0]
        if isinstance(tree, list | tuple):
            return type(tree)(self._moved(item, device) for item in tree)
        if isinstance(tree, dict):
            return {name: self._moved(item, device) for name, item in tree.items()}
        return tree

    def _settle(self, node: Node, result: Any) -> Any:
        """Checks a rule's result against what torch says it is, and stores it when that pays."""
        if isinstance(result, tuple | list):
            values = meta_value(node)
            if not isinstance(values, tuple | list):
                return result
            read = [node if isinstance(values, list) else _part(node, k) for k in range(len(values))]
            return tuple(self._settle_one(node, *one) for one in zip(result, values, read, strict=False))
        return self._settle_one(node, result, meta_value(node), node)

    def _settle_one(self, node: Node, result: Any, value: Any, read: Node) -> Any:
        """One result, for those who read the node `read`."""
        if not isinstance(result, Tensor) or not isinstance(value, torch.Tensor):
            return result
        expected = self.symbols.sizes(value.shape)
        result = _with_ones_of(result, expected)
        if result.dtype != value.dtype or len(expected) != result.rank or not self._may_be(expected, result.sizes):
            raise errors.LoweringFailed(
                operator=operator_name(node.target),
                cause=f"the rule gives {result.dtype} {list(result.sizes)}, torch {value.dtype} {list(expected)}",
                line=self.builder.origin.line,
                aten_node=node.name,
            )
        if self.builder.numerics == "eager" and result.dtype in ops.NARROW_FLOATS:
            result = result.with_value(vs.cast(result.value, result.dtype))
        result = self._with_dear_rows_stored(result)
        kept = self.context.inlining and self._is_kept_operand(read, result)
        if not kept and (result.value.op == "load" or not self._should_store(read, result)):
            return result
        cheap = _cheap_on_gpu(read, result) if self._is_large_on_gpu(result) else CHEAP
        for repeats in (MIN_REPEATS, FEW_REPEATS) if self.context.inlining and not self._is_multiplied(read) else ():
            if remaining_cost(result, repeats) <= cheap and (repeats == MIN_REPEATS or stores_few(result, repeats)):
                thin = with_row_values_stored(self.builder, result, repeats=repeats)
                if not self._should_store(read, thin):
                    return thin
        return self._stored_narrow(node, result) or self.builder.realize(result)

    def _with_dear_rows_stored(self, tensor: Tensor) -> Tensor:
        """The tensor with values of rows in memory that would take a GPU longer, computed for each of its elements."""
        elements = tensor.numel().as_int() or 0
        if not self.context.inlining or not self.builder.on_gpu(tensor.device) or elements < DEAR_WORK // MAX_COST:
            return tensor
        return with_row_values_stored(self.builder, tensor, max(DEAR_OF_ROWS, DEAR_WORK // elements))

    def _may_be(self, expected: ir.Sizes, sizes: ir.Sizes) -> bool:
        """Whether the sizes are equal in the example inputs, as far as these say: one size may have two names."""
        pairs = ((self.symbols.example(x), self.symbols.example(y)) for x, y in zip(expected, sizes, strict=True) if x is not y)
        return all(None in pair or pair[0] == pair[1] for pair in pairs)

    def _stored_narrow(self, node: Node, result: Tensor) -> Tensor | None:
        """The result by way of memory in the narrower type that it was converted from; None where it was not. Eager has that
        in memory too, so as to numbers nothing is lost, and half the bytes are written and read."""
        asked = _is_conversion(node)
        for source in self._narrower_sources(node, result.dtype.itemsize):
            narrow = self.env[source]
            if result.value is not (self._in_memory(narrow) if asked else narrow).value:
                continue
            origin, self.builder.origin = self.builder.origin, origin_of(source)
            stored = self.env[source] = self.builder.realize(narrow)
            self.builder.origin = origin
            return replace(result, value=(self._in_memory(stored) if asked else stored).value)
        return None

    def _narrower_sources(self, node: Node, itemsize: int) -> list[Node]:
        """The tensors that the node reads with elements of fewer bytes. Kept: a foreach operator reads a tensor for each that
        it makes, and each result asks."""
        key = node, itemsize
        if key not in self.narrower:
            sources = ((n, self.env[n]) for n in node.all_input_nodes)
            self.narrower[key] = [n for n, t in sources if isinstance(t, Tensor) and t.dtype.itemsize < itemsize]
        return self.narrower[key]

    def _in_memory(self, tensor: Any) -> Any:
        """A 16-bit tensor with the numbers that eager has in memory. Comparisons take tensors of other types as they are, so
        what these are converted from may not depend on which kernel reads it."""
        if not isinstance(tensor, Tensor) or (tensor.value.op == "load" and self._is_given(tensor.value.attr[0])):
            return tensor
        return rounded(tensor)

    def _is_given(self, name: str) -> bool:
        return self.builder.graph.buffers[name].kind != "intermediate"

    def _should_store(self, node: Node, tensor: Tensor) -> bool:
        if not self.context.inlining:
            return bool(vs.loads([tensor.value]))  # numbers and indices are not data
        cost = vs.total_cost([tensor.value], FAST_ON_GPU if self._is_fast(node, tensor) else None)
        if cost <= 2:
            return False
        reads = {v.attr for v in vs.loads([tensor.value])}
        if len(reads) > MAX_LOADS or cost > MAX_COST:
            return True
        if self._is_window(tensor, reads) and _is_scaled_operand(node):
            return True
        if not _is_read_again(node) or (not reads and cost <= CHEAP_FROM_INDICES):
            return False
        if _is_read_apart(node) or (self._is_large_on_gpu(tensor) and _times_read(node) <= FEW_TIMES):
            return False
        full = [v for v in reads if self._is_full(v, tensor)]
        saves = self._saves_traffic(node, tensor, full, reads)
        many = self._streams(node, tensor, full) > 1 and not self._is_masked(node, tensor, full)
        return many or cost > (self._cheap(node, tensor) if saves else CHEAP)

    def _is_window(self, tensor: Tensor, reads: Collection[Any]) -> bool:
        """Whether a large tensor on a GPU is made of several elements of one buffer, as a filter of a few taps makes it."""
        if not self._is_large_on_gpu(tensor):
            return False
        counts = Counter(attr[0] for attr in reads if self._is_full(attr, tensor))
        return any(count > 1 for count in counts.values())

    def _is_kept_operand(self, node: Node, tensor: Tensor) -> bool:
        """Whether the graph gives its elements away, and multiplies them: as an operand it is stored as well where its elements
        are picked with divisions, as those of an upsampled image are, and that would be a second copy."""
        if node not in self.builder.owners or not self._is_large_on_gpu(tensor) or not self._is_multiplied(node):
            return False
        picked = (e for load in vs.loads([tensor.value]) for e in load.attr[1])
        return any(isinstance(atom, ix.FloorDiv | ix.Mod) for e in picked for atom in _parts(e))

    def _is_fast(self, node: Node, tensor: Tensor) -> bool:
        """Whether it is made of 16-bit numbers that are in memory already, and no matmul reads what is made of it. What a
        kernel makes may not be in memory: it stores the function of its elements in place of them."""
        if tensor.dtype.itemsize != 2 or self.builder.numerics == "eager" or not self._is_large_on_gpu(tensor):
            return False
        return all(self._is_given(load.attr[0]) for load in vs.loads([tensor.value])) and not _reaches_matmul(node)

    def _streams(self, node: Node, tensor: Tensor, full: Sequence[Any]) -> int:
        """How many elements each element moves from memory. On a GPU neighbours in one buffer come from the cache, as in
        ``x[1:] - x[:-1]``: a reader that computes it again moves as little as one that reads it."""
        if not self._is_large_on_gpu(tensor) or self._is_multiplied(node):
            return len(full)
        counts = Counter(name for name, _, _ in full)
        return sum(min(count, self._share(name, tensor)) for name, count in counts.items())

    def _is_masked(self, node: Node, tensor: Tensor, full: Sequence[Any]) -> bool:
        """Whether each element is made of a condition and of one number, as gradients of ReLU are, and few kernels read it, the
        first of which reduces it: with that number and a byte for each of them they move less than a store and loads do."""
        conditions = [load for load in full if load[2] is torch.bool]
        others = [load for load in full if load[2] is not torch.bool]
        if len(conditions) != 1 or len(others) > 1 or not self._is_large_on_gpu(tensor) or self._is_multiplied(node):
            return False
        if any(dtype.itemsize > tensor.dtype.itemsize for _, _, dtype in others):
            return False
        kernels = _kernels_with_sums(node)
        return kernels is not None and kernels <= tensor.dtype.itemsize

    def _share(self, name: str, tensor: Tensor) -> int:
        """A buffer's elements for each of the tensor's."""
        whole = ix.product(self.builder.graph.buffers[name].sizes).as_int()
        return max(1, round(whole / (tensor.numel().as_int() or 1))) if whole else MAX_LOADS

    def _cheap(self, node: Node, tensor: Tensor) -> int:
        return _cheap_on_gpu(node, tensor) if self.builder.on_gpu(tensor.device) else CHEAP_ON_CPU

    def _saves_traffic(self, node: Node, tensor: Tensor, full: Sequence[Any], reads: Collection[Any]) -> bool:
        """Whether each reader moves fewer bytes where it computes the value again, on a device whose arithmetic waits for
        memory. A contraction would compute it for each tile. Codes with one 1 are made of rows alone, and have 8 bytes."""
        if not _is_large(tensor) or self._is_multiplied(node):
            return False
        narrow = all(dtype.itemsize <= tensor.dtype.itemsize for _, _, dtype in full)
        if len(full) == 1:
            return narrow
        return row_cost(tensor) <= CHEAP_OF_ROWS and _is_of_rows(reads, tensor)

    def _is_multiplied(self, node: Node) -> bool:
        """Of a foreach operator, each of hundreds of results asks."""
        if node not in self.multiplied:
            self.multiplied[node] = _is_multiplied(node)
        return self.multiplied[node]

    def _is_large_on_gpu(self, tensor: Tensor) -> bool:
        """Whether memory, and not a launch, decides what a trip through it takes."""
        return self.builder.on_gpu(tensor.device) and _is_large(tensor)

    def _is_full(self, attr: Any, tensor: Tensor) -> bool:
        """Whether a load moves about as much memory as the tensor has elements."""
        used = {a for e in attr[1] for a in ix.free_atoms(e)}
        return any(isinstance(a, ix.Indirect) for a in used) or all(v in used for v in tensor.axes if v.extent != 1)

    def _output(self, result: Any, position: int) -> ir.Output:
        if not isinstance(result, Node):
            return self._number(fallback.symbolic(self.symbols, result), result) if _is_symbolic(result) else result
        lowered = self.env[result]
        if not isinstance(lowered, Tensor) or number_of(lowered):
            return self._number(lowered, meta_value(result))
        return self.results.place(result, position)

    def _number(self, lowered: Any, value: Any) -> Any:
        if isinstance(lowered, Tensor):
            return number_of(lowered)
        if is_nested_int(value):
            return self._argument_multiple(lowered)
        return ir.Number(lowered, "bool") if isinstance(value, torch.SymBool) and isinstance(lowered, Expr) else lowered

    def _argument_multiple(self, wanted: Expr) -> ir.ArgumentMultiple:
        """A nested int has no arithmetic but multiplication by integers."""
        for given, position in self.nested.items():
            factor = ix.as_factor(wanted, given)
            if factor is not None:
                return ir.ArgumentMultiple(position, factor)
        raise errors.LoweringFailed(
            operator="output",
            cause=f"{wanted} is no multiple of a nested int among the arguments",
            line=self.builder.origin.line,
        )


def _with_ones_of(tensor: Tensor, expected: ir.Sizes) -> Tensor:
    """The same elements where the two shapes differ in sizes of 1 only: its consumers were traced with torch's. Torch 2.11
    keeps the dimension of size 1 of a norm along a dimension that is counted from the end, which eager does not."""
    longer = [s for s in tensor.sizes if s != 1]
    if len(expected) == tensor.rank or len(longer) != sum(s != 1 for s in expected):
        return tensor
    sizes = iter(longer)
    return reshape(tensor, [s if s == 1 else next(sizes) for s in expected])


def _listed(owner: torch.Tensor, sizes: ir.Sizes) -> Tensor | None:
    """A list of positions in a few evenly spaced runs as arithmetic, as of ``x[:, [2, 1, 0]]`` or ``x[:, [0, 2, 3]]``: what it
    picks is a view, no data says where it is, and nothing copies the list to a device."""
    if owner.dtype is not torch.int64 or owner.dim() != 1 or not 2 <= owner.numel() <= LONGEST_LIST:
        return None
    found = in_runs(owner.tolist(), axes(sizes)[0].expr())
    return None if found is None else Tensor(sizes, owner.dtype, owner.device, vs.index_value(found))


def _parts(index: Expr) -> frozenset[Any]:
    """The factors of an index's terms."""
    return frozenset(atom for term, _ in index.terms for atom in term)


def _is_large(tensor: Tensor) -> bool:
    return (ix.product(tensor.sizes).as_int() or 0) >= LARGE


def _cheap_on_gpu(node: Node, tensor: Tensor) -> int:
    """Operations that take no longer than what a store of an element saves: more where few elements are read again."""
    if tensor.dtype is not torch.float32 or _is_spread(node):
        return CHEAP_ON_GPU
    again = min(1.0, _times_read(node) - 1)
    return int(CHEAP_FLOAT32_ON_GPU / max(again, FEW_TIMES / 8))


def _times_read(node: Node) -> float:
    """How often the operators that read a node read an element of it, on average: a gather may read few of them."""
    elements, times = _elements(node), 0.0
    for user in node.users:
        name = operator_name(user.target).rpartition(".")[0]
        if rule_of(VIEWS, name) and _elements(user) == elements:
            times += _times_read(user)
        else:
            times += _part_read(user, node)
    return times


def _is_of_rows(reads: Collection[Any], tensor: Tensor) -> bool:
    """Whether loads move little memory, since many of the tensor's elements share what all of them read."""
    used = {a for _, index, _ in reads for e in index for a in ix.free_atoms(e)}
    rest = [v for v in tensor.axes if v not in used]
    return not any(isinstance(a, ix.Indirect) for a in used) and any(ix.lower_bound(v.extent) >= MIN_REPEATS for v in rest)


def _is_spread(node: Node) -> bool:
    """Whether some operator, perhaps some steps later, would compute each element several times: a contraction for each of its
    tiles, others for each element that they make of it. Or there are many operators."""
    elements, reached = _elements(node), {node}
    for _ in range(STEPS):
        readers = {user for one in reached for user in one.users}
        if len(readers) > MOST_READERS or any(
            _elements(user) >= 2 * elements or rule_of(CONTRACTIONS, operator_name(user.target)) for user in readers
        ):
            return True
        views = {user for user in readers if rule_of(VIEWS, operator_name(user.target))}
        reached = views | {user for user in readers if _elements(user) == elements}
    return False


def _is_result_of(given: Node, node: Node) -> bool:
    """Whether a contraction's result, of as many elements as a node makes, reaches an argument by elementwise operators."""
    elements, reached = _elements(node), {given} if _elements(given) == _elements(node) else set[Node]()
    for _ in range(2 * STEPS):
        if any(rule_of(CONTRACTIONS, operator_name(one.target)) for one in reached):
            return True
        way = {one for one in reached if _is_elementwise(one)}
        reached = {before for one in way for before in one.all_input_nodes if _elements(before) == elements}
        if not reached:
            return False
    return False


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _kernels_with_sums(node: Node) -> int | None:
    """How many kernels read a value that reductions read, these together in the first; None of a value that no reduction reads,
    or something but an elementwise operator."""
    if not all(_is_elementwise(user) or 0 < _elements(user) < _elements(node) for user in node.users):
        return None
    first = sum(_is_reduced_next(user, _elements(node)) for user in node.users)
    return 1 + len(node.users) - first if first else None


def _is_reduced_next(user: Node, elements: int, steps: int = STEPS) -> bool:
    """Whether an operator is a reduction, or elementwise, and reductions alone read what comes of it."""
    if 0 < _elements(user) < elements:
        return True
    return steps > 0 and bool(user.users) and all(
        _is_elementwise(user) and _is_reduced_next(one, elements, steps - 1) for one in user.users
    )  # fmt: skip


def _is_elementwise(node: Node) -> bool:
    return _is_pointwise(node) or _is_view(node)


def _reaches_matmul(node: Node) -> bool:
    """Whether what some steps of operators and views make of it is multiplied."""
    reached = {node}
    for _ in range(3 * STEPS):
        reached = {user for one in reached for user in one.users}
        if any(rule_of(CONTRACTIONS, operator_name(user.target)) for user in reached):
            return True
    return False


def _elements(node: Node) -> int:
    """Elements of a tensor of known sizes; 0 for others."""
    value = meta_value(node)
    sizes = value.shape if isinstance(value, torch.Tensor) else (0,)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0


def is_nested_int(value: Any) -> bool:
    """Whether a number is the size of a ragged dimension of a jagged tensor, or a multiple of it."""
    return isinstance(value, torch.SymInt) and value.node.is_nested_int()


def _part(node: Node, position: int) -> Node:
    """The node that takes one of several results, if one alone does, and its readers take a part of that: who reads the other
    results does not read this one."""
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == position]
    alone = len(found) == 1 and all(_elements(reader) < _elements(found[0]) for reader in found[0].users)
    return found[0] if alone else node


def meta_value(node: Node) -> Any:
    """The fake tensor, SymInt or tuple that AOT computed for a node."""
    return node.meta.get("val", node.meta.get("example_value"))


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _has_symbolic_float(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and number_of(leaf) for leaf in tree_leaves(tree))


def _unsupported(node: Node) -> str:
    """Why no kernel can do the node's work whatever its operator."""
    values = (value for one in (node, *node.all_input_nodes) for value in tree_leaves(one.meta.get("val")))
    return next(filter(None, (unsupported(value) for value in values if isinstance(value, torch.Tensor))), "")


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


_VIEWS = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "alias",
        "detach",
        "unbind",
        "getitem",
        "diagonal",
        "as_strided",
        "unfold",
    ]
)


def _is_multiplied(node: Node) -> bool:
    """Whether a contraction reads the result, as it is or by way of views: it reads what is stored sooner than what it computes
    for each of its tiles."""
    for user in node.users:
        name = operator_name(user.target)
        if rule_of(CONTRACTIONS, name) or (rule_of(VIEWS, name) and _is_multiplied(user)):
            return True
    return False


def _is_scaled_operand(node: Node) -> bool:
    """Whether all that is made of the result is an operand of contractions, as it is, in another type, or times a number. As
    windows these would be computed for each tile, and no program has them."""
    return bool(node.users) and all(
        bool(rule_of(CONTRACTIONS, operator_name(user.target)))
        or ((_is_view(user) or _is_scaled(user)) and _is_scaled_operand(user))
        for user in node.users
    )


def _is_view(node: Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default or bool(rule_of(VIEWS, operator_name(node.target)))


def _is_scaled(node: Node) -> bool:
    multiplied = node.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar)
    return multiplied and not isinstance(node.args[1], Node)


def _is_conversion(node: Node) -> bool:
    """Whether the program asks for another type, and not what an operator is made of."""
    whole = node.meta.get("original_aten") or node.target  # perhaps a copy of the operator: graphs are copied with their notes
    return node.target is torch.ops.aten._to_copy.default and str(whole) == str(node.target)


def _is_read_again(node: Node) -> bool:
    """Whether the node has more than one consumer, looking through views. What reads few of its elements may compute these
    again, as a loss does with the logits of its labels."""
    while True:
        readers = [user for user in node.users if not _reads_few(user, node)]
        if len(readers) != 1:
            return len(readers) > 1
        [node] = readers
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        if node.op != "call_function" or name not in _VIEWS:
            return False


def _is_read_apart(node: Node) -> bool:
    """Whether each reader takes one place along a dimension, no more than all of them together: what it takes is stored where
    that pays, as the median of a row that is sorted."""
    selects = all(user.target is torch.ops.aten.select.int for user in node.users)
    return selects and sum(map(_elements, node.users)) <= _elements(node)


def _reads_few(user: Node, source: Node) -> bool:
    """Whether it reads elements of its first operand at positions from data, and not many."""
    return _part_read(user, source) * FEW_GATHERED <= 1


def _part_read(user: Node, source: Node) -> float:
    """The part of a node's elements that an operator reads: less than all where it reads them at positions from data."""
    if user.op != "call_function" or operator_name(user.target) not in GATHERS or user.args[:1] != (source,):
        return 1.0
    return min(1.0, _elements(user) / max(1, _elements(source)))


def rule_of(rules: Mapping[str, Rule], name: str) -> Rule | None:
    """The rule of an operator with its overload, as in ``aten.add.Tensor``; None where there is none."""
    return rules.get(name) or rules.get(name.rpartition(".")[0])


def _may_bind(target: Any) -> bool:
    """Whether data may decide sizes or numbers of an operator's results."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return target.namespace not in ("aten", "prims") or any(tag in target.tags for tag in tags)
