"""The option freezing: what depends on a module's tensors alone is computed and packed once, and never stale."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmuls import error
from slow import slow_but
from test_warm_start import assert_warm, process
from torch import Tensor, nn

import kgen
from kgen import config, errors
from kgen.build import toolchain
from kgen.build.toolchain import NARROW
from kgen.capture.freeze import SMALL
from kgen.cost import model
from kgen.device import AVX512_NARROW
from kgen.host import cudagraph
from kgen.host.frozen import FrozenCall
from kgen.report.record import Record, recording
from kgen.templates.cpp.codegen import packing
from kgen.verdict import Outcome, Reason, Verdict

pytestmark = pytest.mark.cpu

bf, i8 = torch.bfloat16, torch.int8
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, bf: 1e-2, torch.float16: 2e-3, i8: 0.0}


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of an earlier test, no gradients, and matmuls that templates compute."""
    torch._dynamo.reset()
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)
    with torch.no_grad():
        yield


def r(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed + sum(shape))
    if dtype is i8:
        return torch.randint(-128, 128, shape, generator=made, dtype=i8)
    return torch.randn(shape, generator=made).to(dtype)


class Owner(nn.Module):
    """`fn` of its arguments and of tensors that the module owns."""

    def __init__(self, fn: Callable[..., Any], *tensors: Tensor) -> None:
        super().__init__()
        self.fn, self.count = fn, len(tensors)
        for k, one in enumerate(tensors):
            self.register_buffer(f"t{k}", one)

    def forward(self, *args: Any) -> Any:
        return self.fn(*args, *(getattr(self, f"t{k}") for k in range(self.count)))


def freezing(owner: nn.Module, dynamic: bool | None = False, **options: Any) -> Any:
    options = {"cache": False, "freezing": True, **options}
    return torch.compile(owner, backend="kgen", fullgraph=True, dynamic=dynamic, options=options)


def check(fn: Callable[..., Any], args: tuple[Any, ...], *tensors: Tensor, **how: Any) -> Record:
    """Frozen and eager agree, twice; what became of the one graph."""
    owner = Owner(fn, *tensors)
    with recording() as seen, warnings.catch_warnings():
        warnings.filterwarnings("error", "a tensor that the option freezing")
        run = freezing(owner, **how)
        for _ in range(2):
            agree(run(*args), owner(*args))
    (found,) = seen.graphs
    assert isinstance(found, Record)
    return found


def agree(got: Any, want: Any) -> None:
    for one, other in zip(*([tree] if isinstance(tree, Tensor) else tree for tree in (got, want)), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert error(one, other) <= TOLERANCE.get(one.dtype, 0.0), (one, other)


def verdicts(found: Record, *outcomes: Outcome) -> list[Verdict]:
    return [v for v in found.plan.verdicts if v.outcome in outcomes]


def reasons(found: Record, *outcomes: Outcome) -> list[Reason]:
    return [v.reason for v in verdicts(found, *outcomes)]


# ---- matmuls on packed operands -----------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def narrow() -> float:
    """How many times faster than float32 this CPU multiplies bfloat16."""
    return next((times for flag, times in NARROW.items() if flag in toolchain.isa().flags), 1.0)


def widened() -> bool:
    """Whether this CPU multiplies bfloat16 as float32."""
    return narrow() == 1


def few_rows(kind: torch.dtype) -> int:
    """Up to so many rows, columns are read where they lie: with AMX more of them than without."""
    if kind is not bf:
        return packing.FEW_ROWS
    if widened():
        return packing.FEW_WIDENED_ROWS
    return packing.FEW_TILED_ROWS if narrow() > AVX512_NARROW else packing.FEW_ROWS


def gate_up(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


SHAPES = [
    (rows, *size, kind) for rows in (3, 17, 100) for size in ((33, 35), (97, 300)) for kind in (torch.float32, bf, torch.double)
]


@pytest.mark.parametrize(("rows", "columns", "inner", "kind"), slow_but(lambda m, n, k, kind: n == 97 and m == 3, SHAPES))
def test_a_linear_layer_reads_packed_columns(rows: int, columns: int, inner: int, kind: torch.dtype) -> None:
    found = check(linear, (r(rows, inner, dtype=kind),), r(columns, inner, dtype=kind), r(columns, dtype=kind))
    if rows <= few_rows(kind):
        assert not found.plan.packings
        assert Reason.UNPACKED_BETTER in reasons(found, Outcome.NOT_PACKED)
        return
    (one,) = found.plan.packings
    assert (one.lengths, one.strides) == ((1, columns, inner), (0, inner, 1))
    assert found.plan.kernels[0].packed[0][:2] == ("B", 0)


LAYOUTS = {
    "rows": lambda w: w.t().contiguous().t(),
    "columns": lambda w: w.contiguous(),
    "a slice of more": lambda w: torch.cat([w, w], 0)[w.shape[0] :],
    "every second column": lambda w: w.repeat_interleave(2, 0)[::2],
    "wide rows": lambda w: F.pad(w, (3, 5))[:, 3:-5],
}


@pytest.mark.parametrize("layout", slow_but(lambda name: name in ("rows", "wide rows"), LAYOUTS))
def test_operands_of_any_layout(layout: str) -> None:
    w = LAYOUTS[layout](r(70, 90))
    (one,) = check(lambda x, w: x @ w.t(), (r(40, 90),), w).plan.packings
    assert one.strides[1:] == w.stride()


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "rows", "packed"), [(i8, 40, 1), (i8, 4, 0), (torch.float16, 40, 1), (torch.float16, 4, 0)])
def test_widened_numbers_are_packed_for_many_rows(kind: torch.dtype, rows: int, packed: int) -> None:
    """Twice as large they take longer to read."""

    def matmul(x: Tensor, w: Tensor) -> Tensor:
        return torch._int_mm(x, w.t()) if kind is i8 else x @ w.t()

    found = check(matmul, (r(max(rows, 17) if kind is i8 and packed else rows, 96, dtype=kind),), r(64, 96, dtype=kind))
    assert len(found.plan.packings) == packed
    assert reasons(found, Outcome.NOT_PACKED) == [Reason.UNPACKED_BETTER] * (1 - packed)


@pytest.mark.parametrize(("rows", "packed"), [(2, 0), (513, 0), *slow_but(lambda *_: False, [(3, 1), (512, 1)])])
def test_packing_pays_for_some_rows(rows: int, packed: int) -> None:
    found = check(lambda x, w: x @ w.t(), (r(rows, 64),), r(64, 64))
    assert len(found.plan.packings) == packed


def test_kernels_for_all_ranges_of_a_dynamic_length_read_one_array() -> None:
    """A few rows read it, too."""
    owner = Owner(linear, r(96, 64), r(96))
    run = freezing(owner, dynamic=None)
    with recording() as seen:
        for rows in (7, 40, 2, 16, 17, 600, 130):
            x = r(rows, 64)
            torch._dynamo.mark_dynamic(x, 0)
            agree(run(x), owner(x))
    (found,) = seen.graphs
    assert isinstance(found, Record)
    assert len(found.plan.packings) == 1


def test_families_and_grouped_matmuls() -> None:
    x = r(40, 64)
    family = check(gate_up, (x,), r(96, 64), r(96, 64, seed=1))
    assert len(family.plan.kernels) == 1
    assert len(family.plan.packings) == 2
    qkv = check(lambda x, *w: [F.linear(x, one) for one in w], (x,), r(96, 64), r(32, 64), r(32, 64, seed=1))
    assert len(qkv.plan.kernels) == 1
    assert len(qkv.plan.packings) == 3


def test_parts_of_one_operand() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    found = check(gated, (r(40, 64),), r(192, 64))
    assert len({one.source for one in found.plan.packings}) == 1


def test_matmuls_with_one_frozen_operand_share_its_array() -> None:
    def two_matmuls(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(x @ w.t()), y @ w.t()

    found = check(two_matmuls, (r(40, 64), r(70, 64)), r(96, 64))
    assert len(found.plan.packings) == 1
    assert len(verdicts(found, Outcome.PACKED)) == 2


def test_batches_of_operands() -> None:
    found = check(torch.bmm, (r(5, 40, 64),), r(5, 64, 48))
    assert found.plan.packings[0].lengths == (5, 48, 64)
    found = check(lambda x, w: x @ w, (r(2, 3, 40, 64),), r(64, 48))
    assert found.plan.packings[0].lengths == (1, 48, 64)


def test_equal_weights_are_packed_by_one_function() -> None:
    found = check(lambda x, *w: F.relu(F.relu(x @ w[0]) @ w[1]) @ w[2], (r(40, 64),), *(r(64, 64, seed=k) for k in range(3)))
    assert len({found.units.calls[one.name].symbol for one in found.plan.packings}) == 1


def test_a_split_sum_and_reductions_on_tiles() -> None:
    check(lambda x, w: (x @ w).exp().sum(-1), (r(40, 96),), r(96, 128))
    check(lambda x, w: x @ w, (r(40, 4096),), r(4096, 32))


@pytest.mark.parametrize("isa", slow_but(lambda isa: isa == "avx2", ["avx2", "generic"]))
def test_the_array_is_that_of_the_instruction_set(isa: str) -> None:
    for kind in (torch.float32, bf):
        torch._dynamo.reset()
        check(linear, (r(40, 70, dtype=kind),), r(70, 70, dtype=kind), r(70, dtype=kind), isa=isa)


# ---- what is computed once -----------------------------------------------------------------------------------------------


def constants(found: Record) -> list[tuple[str, Outcome]]:
    return [(v.producer, v.outcome) for v in verdicts(found, Outcome.FROZEN, Outcome.NOT_FROZEN)]


def test_casts_copies_and_scales_are_computed_once() -> None:
    def fn(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        w = (w * scale.exp()[:, None]).to(bf)
        return F.linear(x, w) + torch.cat([shift, shift.sin()]).to(bf)

    found = check(fn, (r(40, 96, dtype=bf),), r(64, 96), r(64), r(32))
    assert constants(found) == [("aten._to_copy.default", Outcome.FROZEN)] * 2
    assert reasons(found, Outcome.FROZEN) == [Reason.FROZEN_ALONE] * 2
    assert "exp" not in " ".join(op for kernel in found.plan.kernels for o in kernel.origins for op in o.operators)
    setup = found.blueprint.setup
    assert setup is not None
    assert setup.spent == {0}  # the weight is only read packed


def test_what_would_be_larger_is_computed_where_it_is_read() -> None:
    def fn(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, w.float() * scale.exp()[:, None])

    found = check(fn, (r(40, 600),), r(300, 600, dtype=i8), r(300))
    assert SMALL < (300 * 600)
    refused = {v.producer for v in verdicts(found, Outcome.NOT_FROZEN)}
    assert refused == {"aten.mul.Tensor", "aten._to_copy.default"}
    assert reasons(found, Outcome.FROZEN) == [Reason.FROZEN_ALONE]  # exp of the scales
    assert found.plan.packings == []  # the operand is no load


def test_random_numbers_are_drawn_at_each_call() -> None:
    owner = Owner(lambda x, w: x + F.dropout(w, 0.5), r(1000))
    run = freezing(owner)
    x = torch.zeros(1000)
    assert not torch.equal(run(x), run(x))


def test_results_are_no_constants() -> None:
    """Who gets them may write to them."""
    owner = Owner(lambda x, w: (x + w.sin(), w.sin(), w.sin()[1:]), r(30))
    run = freezing(owner)
    for _ in range(2):
        got = run(r(30))
        agree(got, owner(r(30)))
        for one in got:
            one.zero_()


def test_a_tensor_that_the_graph_writes_is_not_frozen() -> None:
    def step(x: Tensor, cache: Tensor, w: Tensor) -> Tensor:
        cache[1] = x
        return cache.sin() @ w.sin()

    ours, eager = (Owner(step, torch.zeros(5, 40), r(40, 40)) for _ in range(2))
    run = freezing(ours)
    with recording() as seen:
        for seed in range(3):
            agree(run(r(40, seed=seed)), eager(r(40, seed=seed)))
            agree(ours.t0, eager.t0)
    (found,) = seen.graphs
    assert isinstance(found, Record)
    assert Reason.WRITTEN in reasons(found, Outcome.NOT_FROZEN)
    assert len(reasons(found, Outcome.FROZEN)) == 1


def test_a_written_view_of_a_frozen_tensor() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        w.view(-1)[3:].add_(1)
        return x @ w.exp()

    ours, eager = Owner(fn, r(40, 40)), Owner(fn, r(40, 40))
    run = freezing(ours)
    for _ in range(3):
        agree(run(r(40, 40)), eager(r(40, 40)))


def test_training_is_refused() -> None:
    run = freezing(nn.Linear(40, 40))
    with torch.enable_grad(), pytest.raises(Exception, match="the option freezing is for inference") as caught:
        run(r(3, 40))
    assert isinstance(caught.value.__cause__ or getattr(caught.value, "inner_exception", None), errors.FreezingInTraining)
    layer = nn.Linear(40, 40).requires_grad_(requires_grad=False)
    with torch.enable_grad():
        agree(freezing(layer)(r(3, 40)), layer(r(3, 40)))


def test_everything_in_eager_is_left_alone() -> None:
    owner = Owner(lambda x, w: x @ w.sin(), r(40, 40))
    agree(freezing(owner, fallback=["all"])(r(40, 40)), owner(r(40, 40)))


# ---- how long ------------------------------------------------------------------------------------------------------------


def folded(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.sin()


@pytest.mark.parametrize(
    "how", slow_but(lambda how: how in ("written", "replaced"), ["written", "replaced", "other memory", "loaded"])
)
def test_a_changed_tensor_is_seen(how: str) -> None:
    owner = Owner(folded, r(64, 64))
    run, x = freezing(owner), r(40, 64)
    before = run(x)
    new = r(64, 64, seed=5)
    if how == "written":
        owner.t0.copy_(new)
    elif how == "replaced":
        owner.t0 = new
    elif how == "other memory":
        owner.t0.data = new
    else:
        owner.load_state_dict({"t0": new})
    after = run(x)
    agree(after, x @ new.sin())
    assert not torch.equal(before, after)
    agree(run(x), after)


def test_a_broken_promise_is_said() -> None:
    owner = Owner(folded, r(64, 64))
    run = freezing(owner)
    run(r(40, 64))
    owner.t0.add_(1)
    with pytest.warns(UserWarning, match="promised not to change"):
        run(r(40, 64))


def test_equal_modules_share_a_graph_but_no_constants() -> None:
    layers = [Owner(folded, r(64, 64, seed=k)) for k in range(4)]
    runs, x = [freezing(layer) for layer in layers], r(40, 64)
    with recording() as seen:
        for _ in range(2):
            for layer, run in zip(layers, runs, strict=True):
                agree(run(x), layer(x))
    assert len(seen.graphs) == 1


def alive() -> list[FrozenCall]:
    return [one for one in gc.get_objects() if type(one) is FrozenCall]


def arrays(call: FrozenCall) -> list[Tensor]:
    """The constants of all tensors that it was called with."""
    return [one for made in call._known.values() for one in made.constants if one is not None]


@pytest.fixture
def nothing_before() -> None:
    torch.compiler.reset()
    gc.collect()
    assert alive() == []


@pytest.mark.usefixtures("nothing_before")
def test_constants_go_with_the_tensors_they_were_made_of() -> None:
    owner = Owner(folded, r(64, 64))
    freezing(owner)(r(40, 64))
    (call,) = alive()
    (gone,) = map(weakref.ref, arrays(call))
    owner.t0 = r(64, 64, seed=1)
    gc.collect()
    assert gone() is None
    assert call._known == {}
    assert call._last.constants == ()


@pytest.mark.usefixtures("nothing_before")
def test_graphs_share_the_arrays_of_a_tensor() -> None:
    owner = Owner(lambda x, w: x @ w, r(64, 64))
    runs = [freezing(owner) for _ in range(3)]
    for run, rows in zip(runs, (40, 70, 40), strict=True):
        run(r(rows, 64))
    found = [one for call in alive() for one in arrays(call)]
    assert len(found) == 2
    assert found[0] is found[1]
    owner.t0.add_(1)
    with pytest.warns(UserWarning, match="promised not to change"):
        agree(runs[0](r(40, 64)), owner(r(40, 64)))


def test_first_calls_at_once() -> None:
    owner, x = Owner(folded, r(256, 256)), r(40, 256)
    run, want = freezing(owner), Owner(folded, r(256, 256))(x)
    run(x)
    owner.t0 = r(256, 256)
    results: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.append(run(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for one in results:
        agree(one, want)


def test_inference_mode() -> None:
    owner = Owner(folded, r(64, 64))
    run = freezing(owner)
    with torch.inference_mode():
        agree(run(r(40, 64)).clone(), owner(r(40, 64)).clone())
    agree(run(r(40, 64)), owner(r(40, 64)))


# ---- elsewhere -----------------------------------------------------------------------------------------------------------

WARM = """
    torch.manual_seed(SEED)
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(64, 96))
        def forward(self, x):
            return torch.nn.functional.gelu(x @ (self.w * 2).t())
    layer, x = Layer(), torch.randn(40, 96)
    with torch.no_grad():
        run = torch.compile(layer, backend="kgen", options={"freezing": True})
        for _ in range(2):
            torch.testing.assert_close(run(x), layer(x))
"""


@pytest.mark.slow
def test_another_process_has_the_graph_and_weights_of_its_own(tmp_path: Path) -> None:
    first = process(WARM, tmp_path, SEED=0)
    assert first["lowered"] == 1
    for seed in (0, 1):
        assert_warm(process(WARM, tmp_path, SEED=seed), first["kernels"])


@pytest.mark.slow
def test_unfrozen_graphs_are_other_entries(tmp_path: Path) -> None:
    process(WARM, tmp_path, SEED=0)
    assert process(WARM.replace("True}", "False}"), tmp_path, SEED=0)["lowered"] == 1


def test_kernels_for_a_gpu_read_constants() -> None:
    found = check(folded, (r(40, 64),), r(64, 64), gpu_interpreter=True)
    assert reasons(found, Outcome.FROZEN) == [Reason.FROZEN_ALONE]
    assert found.plan.packings == []


def test_the_debug_folder_has_a_script_of_what_is_not_frozen(tmp_path: Path) -> None:
    found = check(folded, (r(40, 64),), r(64, 64), debug=str(tmp_path))
    assert found.plan.packings == []
    assert [path.name for path in tmp_path.glob("*/output_code.py")] == ["output_code.py"]


def test_what_is_read_packed_is_no_argument_of_the_program() -> None:
    found = check(lambda x, w: x @ w, (r(40, 64),), r(64, 64))
    kinds = [type(one).__name__ for one in found.blueprint.program.inputs]
    assert sorted(kinds[:2]) == ["InputIgnored", "InputTensor"]
    assert kinds[2:] == ["InputTensor"]  # the array


def test_explain_says_what_is_done_once(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(x, w.sin()) + F.linear(x[:2], v).sum(0)

    with config.override(freezing=True):
        explained = kgen.explain(Owner(fn, r(64, 64), r(64, 64)), r(40, 64))
    text = " ".join(capsys.readouterr().out.split())
    assert "1 x computed once because it depends on frozen tensors alone" in text
    assert "1 x packed once because that operand is a frozen tensor" in text
    assert "at each call, though of frozen tensors:" in text
    assert "with 2 rows it is read as fast unpacked" in text
    assert {v.outcome for v in explained.graphs[0].verdicts} >= {Outcome.FROZEN, Outcome.PACKED, Outcome.NOT_PACKED}


def test_without_the_option_nothing_is_frozen() -> None:
    owner = Owner(folded, r(64, 64))
    with recording() as seen, config.override(freezing=False):
        torch.compile(owner, backend="kgen", options={"cache": False})(r(40, 64))
    (found,) = seen.graphs
    assert isinstance(found, Record)
    assert (found.blueprint.setup, found.plan.packings, found.info.freezing) == (None, [], None)


def test_the_rule_knows_the_words_of_the_engine() -> None:
    """Twice as many bytes: eight bits as 16, halves as floats; not bfloat16 where the CPU multiplies it."""
    found = check(lambda x, w: x @ w, (r(40, 64, dtype=bf),), r(64, 64, dtype=bf))
    (one,) = found.plan.packings
    assert one.count * one.dtype.itemsize >= 64 * 64 * 2
    assert packing.COLUMNS * packing.DEPTH * one.dtype.itemsize <= one.count * one.dtype.itemsize


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudagraph, "FEWEST", 1)
    layers = [Owner(lambda x, w: F.relu(x @ w.to(bf).t()), r(64, 96, seed=k).cuda()) for k in range(2)]
    runs = [freezing(layer, mode=mode) for layer in layers]
    x = r(40, 96, dtype=bf).cuda()
    for _ in range(4):
        for layer, run in zip(layers, runs, strict=True):
            agree(run(x).clone(), layer(x))
    layers[0].t0.mul_(2)
    with pytest.warns(UserWarning, match="promised not to change"):
        agree(runs[0](x).clone(), layers[0](x))


# ---- weights of norms -------------------------------------------------------------------------------------------------------


def normalised(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (x.shape[-1],), g), w)


def weighted_last(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return F.linear(g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), w)


def gated(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = F.rms_norm(x, (x.shape[-1],), g)
    return F.silu(F.linear(y, w)) * F.linear(y, v)


def weights_in_kernels(found: Record) -> bool:
    """Whether some matmul's operand is computed."""
    mains = [s for step in found.plan.kernels for s in step.statements if s.kind == "contraction"]
    assert mains
    return any(value.op != "load" for s in mains for value in (s.value, *s.factors))


@pytest.mark.parametrize("kind", [torch.float32, bf])
@pytest.mark.parametrize("fn", [normalised, weighted_last, gated])
def test_weights_of_norms_become_part_of_matrices(fn: Callable[..., Tensor], kind: torch.dtype) -> None:
    more = [r(64, 48, dtype=kind, seed=k) for k in range(2 if fn is gated else 1)]
    found = check(fn, (r(2, 35, 48, dtype=kind),), r(48, dtype=kind).abs(), *more)
    assert not weights_in_kernels(found)
    assert len(found.plan.kernels) == 2


@pytest.mark.parametrize("how", ["another reader", "bytes", "float16", "stable", "an argument"])
def test_weights_that_stay_with_rows(how: str) -> None:
    """Of rows that something else needs, matrices that are read in another form, and where the order is the program's."""
    kind = torch.float16 if how == "float16" else torch.float32

    def fn(x: Tensor, g: Tensor, w: Tensor) -> Any:
        y = F.rms_norm(x, (48,), g)
        z = F.linear(y, w.to(kind))
        return (z, y) if how == "another reader" else z

    x, g, w = r(70, 48, dtype=kind), r(48, dtype=kind), r(64, 48, dtype=i8 if how == "bytes" else kind)
    options = {"numerics": "stable"} if how == "stable" else {}
    args, tensors = ((x, g), (w,)) if how == "an argument" else ((x,), (g, w))
    found = check(fn, args, *tensors, **options)
    frozen = [v.producer for v in found.plan.verdicts if v.outcome is Outcome.FROZEN]
    assert not any("mul" in one for one in frozen)
