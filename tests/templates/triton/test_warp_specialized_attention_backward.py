"""Gradients of attention by warps with parts of their own on a Hopper GPU: what is made together, what compiles, what waits for
what, and what is refused."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.attention_backward import ALL_GRADIENTS, CAPPED, CAUSAL, TEMPLATES, WARP_SPECIALIZED, beside, saved, written_out
from kgen.build import triton
from kgen.device import Device
from kgen.ir import values as vs
from kgen.ir.plan import ComboKernel, Launch, members
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.triton.codegen.gluon_steps import parts_of, vanishes
from kgen.verdict import Reason
from tests.attention_configurations import drawn_large
from tests.attention_gradients import ALIBI, PLAIN, SOFTCAP, Score, arguments, bf16, causal, f32, gradients, positions, window
from tests.attention_plans import training_plans
from tests.codegen import options_for, rendered
from tests.kernels import plans
from tests.tile_sums import TileSums
from tests.warp_barriers import Program, WaitsForever, run, run_in_order

OPERANDS, VALUES = WARP_SPECIALIZED
WANTED = {"q": OPERANDS, "k": OPERANDS, "v": VALUES, "qkv": OPERANDS}
Scored = tuple[Score, Score]


def planned(
    score: Scored,
    mask: Score | None,
    lengths: tuple[int, int, int, int],
    wanted: str,
    number: int = 0,
    dtype: torch.dtype = bf16,
) -> tuple[Any, Options, list[Config]]:
    """The plan of gradients under the configuration of a number, and all of these."""
    seen: list[Config] = []

    def pick(configs: Sequence[Config]) -> Config:
        seen[:] = configs
        return seen[number % len(seen)]

    args = arguments(score, mask, lengths, dtype)
    also = tuple(one for one in WARP_SPECIALIZED if one != WANTED[wanted])
    options = Options(gpu_everywhere=True, only=Only(WANTED[wanted], pick, also=also))
    function = partial(gradients, score=score, mask=mask, wanted=wanted)
    return plans(function, *args, options=options).forward, options, seen


def call_of(plan: Any, options: Options) -> tuple[Launch, KernelCall]:
    """The kernel that makes most gradients."""
    step = max(plan.kernels, key=lambda one: len(members(one)))
    return step, rendered(step, plan, "kernel", options)


def launched(plan: Any, options: Options) -> tuple[Launch, TritonKernel]:
    step, call = call_of(plan, options)
    assert isinstance(call.launch, TritonKernel)
    return step, call.launch


def programs_of(plan: Any, options: Options) -> int:
    """Of that kernel."""
    count, *_ = call_of(plan, options)[1].grid
    return count.as_int() or 0


# ---- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.none
def test_gradients_of_keys_and_values_are_one_kernel() -> None:
    """Scores are computed once for both, and so are weights where a mask keeps all."""
    plan, options, _ = planned(PLAIN, causal, (256, 256, 64, 64), "qkv")
    step, launch = launched(plan, options)
    assert [len(members(one)) for one in plan.kernels] in ([1, 2], [2, 1])
    assert isinstance(step, ComboKernel)
    assert [k.choice.template for k in step.members if k.choice is not None] == [OPERANDS, VALUES]
    loops = launch.source.split("for n0 in")[2:]
    assert [loop.count("ws.scores(") for loop in loops[:-1]] == [2] * (len(loops) - 1)
    assert any(v.reason is Reason.SAME_OPERAND for v in plan.verdicts)


def trained(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, as a model writes it."""
    s = (q @ k.mT) * 0.25
    rows, columns = (torch.arange(length) for length in s.shape[-2:])
    return s.masked_fill(columns > rows[:, None], -torch.inf).float().softmax(-1).to(q.dtype) @ v


def backward_of(
    lengths: tuple[int, int, int],
    templates: Sequence[str] = (OPERANDS, VALUES),
    function: Callable[[Tensor, Tensor, Tensor], Tensor] = trained,
) -> tuple[Any, Options]:
    rows, keys, head = lengths
    q, k, v = (torch.randn(2, 2, n, head, dtype=bf16).requires_grad_() for n in (rows, keys, keys))
    only = Only(templates[0], lambda configs: configs[0], also=(*templates, "triton_attention"))
    return training_plans(function, q, k, v, only=only)[1], options_for(True, only)


@pytest.mark.none
def test_a_training_step_has_two_kernels_of_gradients() -> None:
    """That of values may run later than it came: the other one needs the sums of rows between the two."""
    plan, options = backward_of((256, 256, 64))
    steps = [step for step in plan.kernels if members(step)[0].contracts]
    assert [len(members(step)) for step in steps] == [2, 1]
    launch = rendered(steps[0], plan, "kernel", options).launch
    assert isinstance(launch, TritonKernel)
    assert "edge_holds" in launch.source, "where a row sees nothing its weights are no numbers"


def exponentials(source: str) -> set[int]:
    """Tiles of powers that loops have for a tile of scores."""
    loops = source.split("def kernel_rows(")[1].split("@gluon.jit")[0].split("for n0 in")[1:]
    return {len(re.findall(r"exp2?\(", loop)) for loop in loops}


def trained_on_earlier(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first row has no key."""
    s = (q @ k.mT) * 0.25
    rows, columns = (torch.arange(length) for length in s.shape[-2:])
    return s.masked_fill(columns >= rows[:, None], -torch.inf).float().softmax(-1).to(q.dtype) @ v


@pytest.mark.none
def test_gradients_share_their_weights() -> None:
    """A row that sees nothing has weights that are no numbers, and gradients of scores that are 0: only where a mask keeps all
    are they the same."""
    for mask in (None, causal, window):
        plan, options, _ = planned(PLAIN, mask, (256, 256, 64, 64), "qkv")
        assert exponentials(launched(plan, options)[1].source) == {1}, mask
    for function, expected in ((trained, {1}), (trained_on_earlier, {1, 2})):
        plan, options = backward_of((256, 256, 64), function=function)
        step = next(step for step in plan.kernels if len(members(step)) > 1)
        launch = rendered(step, plan, "kernel", options).launch
        assert isinstance(launch, TritonKernel)
        assert exponentials(launch.source) == expected, function
        [compiled] = triton.compile_kernels([launch], 90)
        assert compiled.registers


# ---- all in one launch --------------------------------------------------------------------------------------------------


def upwards(s: Tensor, *_: Tensor) -> Tensor:
    """Rows see keys from their own on."""
    rows, columns = positions(s)
    return columns >= rows


def wide(s: Tensor, *_: Tensor) -> Tensor:
    rows, columns = positions(s)
    return (columns <= rows) & (rows - columns < 150)


def late(s: Tensor, *_: Tensor) -> Tensor:
    """The first 150 rows see no key, nor does any row see the last keys."""
    rows, columns = positions(s)
    return (columns + 150 <= rows) & (columns < 160)


def prefix(s: Tensor, *_: Tensor) -> Tensor:
    rows, columns = positions(s)
    return (columns <= rows) | (columns < 100)


def backwards(s: Tensor, *_: Tensor) -> Tensor:
    """Later rows see fewer keys, so that later keys are seen by fewer rows."""
    rows, columns = positions(s)
    return columns < s.shape[-2] - rows


def together(
    mask: Score | None, lengths: tuple[int, int, int, int], number: int = 0, score: Scored = PLAIN, wanted: str = "qkv"
) -> tuple[Any, Options, list[Config]]:
    seen: list[Config] = []

    def pick(configs: Sequence[Config]) -> Config:
        seen[:] = configs
        return seen[number % len(seen)]

    options = Options(gpu_everywhere=True, only=Only(ALL_GRADIENTS[0], pick, also=ALL_GRADIENTS))
    args = arguments(score, None if mask is late else mask, lengths, bf16)
    return plans(partial(gradients, score=score, mask=mask, wanted=wanted), *args, options=options).forward, options, seen


MASKS = {"none": None, "causal": causal, "upwards": upwards, "window": window, "wide": wide, "late": late, "prefix": prefix}


def two(*args: Tensor) -> Tensor:
    return torch.stack((trained(*args[:3]), trained(*args[3:])))


@pytest.mark.none
def test_equal_layers_have_one_text() -> None:
    """Where programs meet in a workspace, too: its name is as made up as those of tensors."""
    args = [torch.randn(2, 2, 256, 64, dtype=bf16).requires_grad_() for _ in range(6)]
    only = Only(ALL_GRADIENTS[0], lambda configs: configs[0], also=(*ALL_GRADIENTS, "triton_attention"))
    plan, options = training_plans(two, *args, only=only)[1], options_for(True, only)
    steps = [step for step in plan.kernels if isinstance(step, ComboKernel) and members(step)[0].contracts]
    launches = [rendered(step, plan, f"kernel{number}", options).launch for number, step in enumerate(steps)]
    assert len(launches) == 2
    assert all("_sums" in launch.source for launch in launches), "there is a workspace"
    assert len({launch.key for launch in launches}) == 1


@pytest.mark.none
def test_gradients_of_queries_are_made_with_those_of_keys_and_values() -> None:
    for plan, options in (together(causal, (256, 256, 64, 64))[:2], backward_of((256, 256, 64), ALL_GRADIENTS)):
        step, launch = launched(plan, options)
        assert isinstance(step, ComboKernel)
        assert [k.choice.template for k in step.members if k.choice is not None] == [ALL_GRADIENTS[0], *ALL_GRADIENTS]
        loops = launch.source.split("def kernel_rows(")[1].split("@gluon.jit")[0].split("for back in")[1:]
        assert [loop.count("ws.scores(") for loop in loops[:-1]] == [2] * (len(loops) - 1), "scores are computed once for all"


@pytest.mark.none
@pytest.mark.every(2)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_queries_have_their_parts_in_the_order_of_the_keys(name: str) -> None:
    """Each tile is stored by the first program that has a part of it, added to by the others, and read by the last one only."""
    rows, keys = 330, 300
    for number in range(2):
        plan, options, configs = together(MASKS[name], (rows, keys, 64, 64), number)
        assert len(configs) == 3
        tiles, programs = -(-rows // 64), programs_of(plan, options)
        assert programs == 6 * -(-keys // 128)
        found = run_in_order(launched(plan, options)[1], programs)
        assert found.read.keys() == {tile * 64 for tile in range(6 * tiles)}
        for row, [(reader, there)] in found.read.items():
            added = found.added.get(row, [])
            assert added == sorted(set(added))
            assert there == bool(added)
            assert not added or added[-1] == reader


@pytest.mark.none
def test_a_program_does_not_wait_for_one_that_may_not_have_begun() -> None:
    plan, options, _ = together(causal, (256, 256, 64, 64))
    with pytest.raises(WaitsForever, match="number 1 at"):
        Program(launched(plan, options)[1], 1, random.Random(0), TileSums(begun=8))


@pytest.mark.none
def test_gradients_in_another_order_are_left_to_two_launches() -> None:
    """Where later keys are seen by fewer rows; and gradients of two operands alone."""
    assert alone(together(backwards, (256, 256, 64, 64))[0])
    assert alone(together(causal, (256, 256, 64, 64), wanted="qk")[0])
    assert alone(together(causal, (256, 256, 64, 64), wanted="kv")[0])


def alone(plan: Any) -> bool:
    return all(len(members(one)) == 1 for one in plan.kernels)


# ---- barriers ---------------------------------------------------------------------------------------------------------

PROTOCOLS: dict[str, tuple[Scored, Score | None, tuple[int, int, int, int]]] = {
    "plain": (PLAIN, None, (200, 330, 64, 64)),
    "causal": (PLAIN, causal, (300, 300, 128, 128)),
    "window": (ALIBI, window, (256, 192, 64, 32)),
}


@pytest.mark.none
@pytest.mark.every(5)
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_all_warps_come_to_their_end(name: str, wanted: str) -> None:
    _, _, configs = planned(*PROTOCOLS[name], wanted)
    for number in range(len(configs)):
        plan, options, _ = planned(*PROTOCOLS[name], wanted, number)
        run(launched(plan, options)[1], range(0, 12, 5), orders=2)


@pytest.mark.none
@pytest.mark.parametrize("name", PROTOCOLS)
def test_all_warps_come_to_their_end_together(name: str) -> None:
    score, mask, (rows, keys, *_) = PROTOCOLS[name]
    for number in range(3):
        plan, options, _ = together(mask, (rows, keys, 64, 64), number, score)
        run(launched(plan, options)[1], range(0, 12, 5), orders=2)


@pytest.mark.none
@pytest.mark.parametrize("wanted", ["k", "v", "qkv"])
def test_numbers_of_columns_are_read_before_their_memory_is_free(wanted: str) -> None:
    """They come with the columns, whose stage TMA fills again when all groups have released it."""
    how = PLAIN, causal, (256, 256, 64, 64), wanted
    for number in range(len(planned(*how)[2])):
        plan, options, _ = planned(*how, number)
        consumer = launched(plan, options)[1].source.split("def kernel_rows(")[1].split("def kernel(")[0]
        for loop in consumer.split("for n0 in")[1:-1]:
            assert 0 < loop.rfind(".load(gl.SliceLayout(0, in_scores))") < loop.find("ws.release_read(columns_free"), loop


@pytest.mark.none
def test_numbers_of_rows_that_begin_anywhere_come_by_pointers() -> None:
    """TMA wants the first number of a tile at a multiple of 16 bytes."""
    for rows, by_tma in ((256, True), (333, False)):
        plan, options, _ = planned(PLAIN, causal, (rows, rows, 64, 64), "k")
        assert ("release_read(columns_free" in launched(plan, options)[1].source) == by_tma


@pytest.mark.none
def test_numbers_of_one_buffer_that_are_read_differently_have_memory_of_their_own() -> None:
    """Heads that share their keys are two loops for the gradient of values, and one for that of queries."""
    drawn = drawn_large(36)
    args = [one.requires_grad_(one.is_floating_point()) for one in drawn.arguments()]
    only = Only(OPERANDS, lambda configs: configs[0], also=(VALUES, "triton_attention", *TEMPLATES))
    plan = training_plans(drawn.function, *args, only=only)[1]
    step = max(plan.kernels, key=lambda one: len(members(one)))
    launch = rendered(step, plan, "kernel", options_for(True, only)).launch
    assert isinstance(step, ComboKernel)
    assert isinstance(launch, TritonKernel)
    for function in (one for one in ast.walk(ast.parse(launch.source)) if isinstance(one, ast.FunctionDef)):
        names = [one.arg for one in function.args.args]
        assert sorted(set(names)) == sorted(names), function.name
    compile(launch.source, "kernel.py", "exec")


def without_empty_sentences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of sentences without any word, which one number says, weights are 0."""
    keep = torch.arange(k.shape[-2]) < torch.tensor([[k.shape[-2]], [0]])
    s = (q @ k.mT * 0.25).masked_fill(~keep[:, None, None, :], -torch.inf)
    return torch.where(keep.any(-1)[:, None, None, None], s.softmax(-1), 0) @ v


@pytest.mark.ptx
@pytest.mark.parametrize("templates", [tuple(WARP_SPECIALIZED), ALL_GRADIENTS])
def test_a_mask_may_be_one_number_for_a_batch(templates: Sequence[str]) -> None:
    """Gluon cannot spread it over a tile."""
    plan, options = backward_of((256, 256, 64), templates, without_empty_sentences)
    steps = [step for step in plan.kernels if members(step)[0].contracts]
    launches = [rendered(step, plan, "kernel", options).launch for step in steps]
    assert triton.compile_kernels([one for one in launches if isinstance(one, TritonKernel)], 90)


# ---- a GPU's compiler -------------------------------------------------------------------------------------------------


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("head", [64, 128])
def test_all_configurations_fit(head: int, wanted: str) -> None:
    """Little is spilled, and no more shared memory is needed than the template says."""
    how = PLAIN, causal, (256, 256, head, head), wanted
    _, _, configs = planned(*how)
    assert configs
    for number, config in enumerate(configs):
        plan, options, _ = planned(*how, number)
        step, launch = launched(plan, options)
        [made] = triton.compile_kernels([launch], 90)
        problems = [chosen_problem(one, plan.graph, Device()) for one in members(step)]
        assert made.stack <= (128 if len(problems) > 1 else 64), config
        assert made.shared <= needed(problems, config).shared, config


def needed(problems: Sequence[Problem], config: Config) -> Any:
    author = problems[0].template.author
    if len(problems) > 1:
        return author.resources_of_parts(problems, config)
    return author.resources(problems[0], config)


@pytest.mark.ptx
@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, causal])
def test_all_configurations_fit_together(mask: Score | None) -> None:
    for number in range(3):
        plan, options, configs = together(mask, (256, 256, 64, 64), number)
        step, launch = launched(plan, options)
        [made] = triton.compile_kernels([launch], 90)
        problems = [chosen_problem(one, plan.graph, Device()) for one in members(step)]
        assert made.stack <= 64, configs[number]
        assert made.shared <= needed(problems, configs[number]).shared, configs[number]


@pytest.mark.ptx
@pytest.mark.parametrize("wanted", ["q", "qkv"])
def test_multiplications_are_under_way_together(wanted: str) -> None:
    """The assembler makes none wait for each other, and exponentials stand between waits that leave some under way."""
    plan, options, _ = planned(PLAIN, causal, (512, 512, 128, 128), wanted)
    [made] = triton.compile_kernels([launched(plan, options)[1]], 90)
    text = triton.dumped(made.cubin, "-sass")
    assert text.count("WARPGROUP.DEPBAR") * 4 <= text.count("HGMMA")
    parts = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text)
    beside = [part.count("MUFU.EX2") for pending, part in zip(parts[1::2], parts[2::2], strict=True) if pending != "0"]
    assert max(beside) >= 32


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(512, 512), (700, 700), (300, 700)])
@pytest.mark.parametrize("mask", ["none", "causal", "wide", "prefix"])
def test_gradients_in_one_launch_are_right_and_always_the_same(mask: str, lengths: tuple[int, int]) -> None:
    """As near to float64 as eager's are, and equal bit by bit, whichever program is faster."""
    args = [one.cuda() for one in arguments(PLAIN, MASKS[mask], (*lengths, 64, 64), bf16)]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        return gradients(*given, score=PLAIN, mask=MASKS[mask])

    torch._dynamo.reset()
    with only(ALL_GRADIENTS[0], lambda configs: configs[0], also=ALL_GRADIENTS):
        compiled = torch.compile(function, backend="kgen", options={"strict": True})
        found = [compiled(*args) for _ in range(5)]
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more, strict=True))
    want, eager = function(*(one.double() for one in args)), function(*args)
    for got, exact, other in zip(found[0], want, eager, strict=True):
        assert (got - exact).norm() <= 1.2 * (other - exact).norm() + 1e-4 * exact.norm()


# ---- what is left to others -------------------------------------------------------------------------------------------


def reasons(template: str, function: Callable[..., Any], args: Sequence[Tensor]) -> list[str | None]:
    """Why a template does not take the gradients that the portable one does."""
    rival = WARP_SPECIALIZED[template]
    only = Only(rival, lambda configs: configs[0], also=tuple(one for one in beside(template) if one != rival))
    plan = plans(function, *args, options=Options(gpu_everywhere=True, only=only)).forward
    kernels = [k for step in plan.kernels for k in members(step) if k.choice is not None and k.choice.template == rival]
    return [registry.find(template).author.refuse(chosen_problem(k, plan.graph, Device())) for k in kernels]


def of(score: Scored, dtype: torch.dtype, wanted: Sequence[str], head: int = 64) -> tuple[Callable[..., Any], list[Tensor]]:
    args = arguments(score, causal, (70, 90, head, head), dtype)
    return partial(gradients, score=score, mask=causal, wanted=wanted), args


@pytest.mark.none
def test_it_says_why_not() -> None:
    assert reasons(OPERANDS, *of(PLAIN, bf16, "qk")) == [None, None]
    assert reasons(VALUES, *of(SOFTCAP, bf16, "v")) == [None]
    assert all("16 bits" in str(one) for one in reasons(OPERANDS, *of(PLAIN, f32, "qk")))
    found = reasons(OPERANDS, *of(PLAIN, bf16, ["q", "rows"]))
    assert any("computed" in str(one) for one in found)


@pytest.mark.none
def test_much_work_is_left_to_others_by_default() -> None:
    """Measured, a softcap is faster by pointers."""
    found = [uncalibrated(score) for score in (PLAIN, ALIBI, SOFTCAP)]
    assert [one is None for one in found] == [True, True, False]
    assert "much work" in str(found[-1])


def uncalibrated(score: Scored) -> str | None:
    plan, _, _ = planned(score, causal, (256, 256, 64, 64), "q")
    [kernel] = [k for step in plan.kernels for k in members(step) if k.choice is not None]
    return chosen_problem(kernel, plan.graph, Device()).uncalibrated


def test_functions_with_two_factors_are_made_in_parts() -> None:
    """The derivative of a cap is one part, its weights another."""
    q, k, v = (torch.randn(2, 2, 70, 64, dtype=bf16) for _ in range(3))
    args = saved(CAPPED, q, k, v, torch.zeros(2, 70, 70, dtype=bf16))
    assert reasons(OPERANDS, written_out(CAPPED, OPERANDS), args) == [None, None]
    args = saved(CAUSAL, q, k, v)
    assert reasons(OPERANDS, written_out(CAUSAL, OPERANDS), args) == [None, None]


def strict(s: Tensor, *_: Tensor) -> Tensor:
    """Row 0 has no key."""
    return torch.arange(s.shape[-1], device=s.device) < torch.arange(s.shape[-2], device=s.device)[:, None]


@pytest.mark.none
@pytest.mark.parametrize("wanted", ["q", "k"])
def test_rows_of_which_a_mask_keeps_nothing_have_no_gradients(wanted: str) -> None:
    """Their log-sum-exp is -inf and their results are NaN, so that a weight of 0 times the rest would be NaN as well."""
    for mask, asks in ((causal, False), (window, False), (strict, True)):
        plan, options, _ = planned(PLAIN, mask, (256, 256, 64, 64), wanted)
        source = launched(plan, options)[1].source
        assert ("tl.where((early0 == 0), 0.0, " in source) == asks


# ---- functions in two parts -------------------------------------------------------------------------------------------

S, T = (vs.step_result(name, f32) for name in ("s", "t"))


def test_one_part_says_all_of_an_element() -> None:
    weight = vs.call("exp", vs.call("sub", S, vs.const(2.0, f32)))
    function = vs.call("sub", vs.call("mul", weight, T), vs.call("mul", weight, vs.const(3.0, f32)))
    assert parts_of(function, "s") == (weight,)
    assert parts_of(weight, "s") == (weight,)
    assert vanishes(function, frozenset([weight]))


def test_several_parts_say_it_together() -> None:
    weight, slope = vs.call("exp", S), vs.call("tanh", S)
    function = vs.call("mul", vs.call("mul", weight, T), slope)
    assert set(parts_of(function, "s")) == {weight, slope}
    assert vanishes(function, frozenset([weight, slope]))


def test_sums_of_other_things_do_not_vanish() -> None:
    weight = vs.call("exp", S)
    assert not vanishes(vs.call("add", vs.call("mul", weight, T), T), frozenset([weight]))
    assert not vanishes(vs.call("exp", weight), frozenset([weight]))
    chosen = vs.where(vs.call("lt", T, vs.const(0.0, f32)), weight, vs.const(0.0, f32))
    assert vanishes(vs.call("neg", chosen), frozenset([weight]))
