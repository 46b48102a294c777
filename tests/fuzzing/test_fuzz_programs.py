"""The program fuzzer: some fixed seeds, and that it finds what it is for.

`make fuzz-programs` runs many more; tests/fuzz_programs.py says how.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fuzz_loops import grow_loop
from fuzz_operations import OPERATIONS, RAISING
from fuzz_oracle import Finding, OtherOrder, Outcome, check, reordered, repeats
from fuzz_program import Program, grow, runs, shrunk
from fuzz_programs import Worker, module, operations

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

FORWARD = range(100, 118)
GRADIENTS = range(20, 28)
# Some that have been wrong, and some others.
LOOPS = (3, 5, 11, 17)
CONVERTED = (6, 25, 26, 38, 47, 51, 67, 94)


def program(*lines: str, outputs: Sequence[str] = ("v0",), base: str = "randn(5, 3, 4)", **how: Any) -> Program:
    return Program(0, (("b0", base),), (("x0", "b0"),), lines, tuple(outputs), **how)


def assert_right(one: Program) -> None:
    found = check(one)
    assert not found.bad, f"{found.kind}: {found.text}\n{module(one, 'cpu')}"


@pytest.mark.every(3)
@pytest.mark.cpu
@pytest.mark.parametrize("seed", FORWARD)
def test_program_is_right(seed: int) -> None:
    assert_right(grow(seed, OPERATIONS, list(RAISING)))


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("seed", GRADIENTS)
def test_gradients_of_a_program_are_right(seed: int) -> None:
    assert_right(grow(seed, OPERATIONS, list(RAISING), gradients=True))


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("seed", LOOPS)
def test_a_loop_is_right(seed: int, gradients: bool) -> None:
    assert_right(grow_loop(seed, gradients))


@pytest.mark.every(4)
@pytest.mark.cpu
@pytest.mark.parametrize("seed", CONVERTED)
def test_a_loop_that_tensors_decide_is_right(seed: int) -> None:
    assert_right(grow_loop(seed, converted=True))


def changed(change: Callable[[list[torch.Tensor]], Any]) -> Any:
    """A backend that runs the graph in eager and changes its results."""

    def run(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return lambda *args: change(list(gm(*args)))

    return run


def refuse(results: list[torch.Tensor]) -> list[torch.Tensor]:
    raise ValueError("no")


PLAIN = program("v0 = torch.tanh(x0)", "v1 = v0.view(-1)", outputs=("v0", "v1"))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda r: r, "ok"),
        (lambda r: [x * (1 + 1e-4) for x in r], "values"),
        (lambda r: [x.clone() for x in r], "alias"),
        (lambda r: [x.double() for x in r], "type"),
        (refuse, "error"),
    ],
)
def test_differences_have_names(change: Callable[[list[torch.Tensor]], Any], kind: str) -> None:
    assert check(PLAIN, backend=changed(change)).kind == kind


def test_strides_matter() -> None:
    turned = changed(lambda r: [r[0].t().contiguous().t()])
    assert check(program("v0 = x0 * 2"), backend=turned).kind == "strides"


def test_a_missing_exception_is_found() -> None:
    reads = program("v0 = x0[torch.tensor([7], device=D)]", raises="IndexError")
    assert check(reads, backend=lambda gm, _: lambda x: [x[:1]]).kind == "silent"
    assert check(reads, backend=changed(lambda r: r)).kind == "ok"


def test_results_of_an_earlier_call_stay() -> None:
    kept = torch.zeros(3, 4)
    assert check(
        program("v0 = x0 * 0"), backend=lambda gm, _: lambda x: [kept.add_(1) - 1 if kept.max() < 1 else kept.fill_(2)]
    ).bad


def test_what_depends_on_the_last_bits_is_not_compared() -> None:
    tie = program("v0 = torch.sin(x0) / 3 * 3 == torch.sin(x0)")
    assert check(tie, backend=changed(lambda r: [~r[0]])).kind in ("ok", "values")  # some elements are stable
    assert (
        check(program("v0 = (torch.sin(x0) / 3).sum() * 3 > torch.sin(x0).sum()"), backend=changed(lambda r: [~r[0]])).kind
        == "ok"
    )
    assert check(program("v0 = x0 > 0.1"), backend=changed(lambda r: [~r[0]])).kind == "values"


def test_a_sum_of_terms_has_their_last_bits_near_a_root() -> None:
    near = program("v0 = torch.digamma(x0)", base="randn(6).to(f64) * 0 + 1.5")
    assert check(near, backend=changed(lambda r: [r[0] + 3e-16])).kind == "ok"
    assert check(near, backend=changed(lambda r: [r[0] + 1e-13])).kind == "values"


def test_what_eager_itself_does_not_repeat_is_not_compared() -> None:
    one = Outcome(results=[torch.ones(3)])
    assert repeats(one, Outcome(results=[torch.ones(3) + 1e-6]))
    assert not repeats(one, Outcome(results=[torch.full((3,), torch.nan)]))
    assert not repeats(Outcome(results=[torch.ones(3) > 0]), Outcome(results=[torch.ones(3) > 1]))


def test_a_16_bit_result_may_be_more_exact_than_eager() -> None:
    rounded = program("v0 = x0.cumsum(0) * x0.exp()", base="randn(5, 64).to(bf16)")
    exact = changed(lambda r: r)

    def in_float32(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return lambda x: [(x.float().cumsum(0) * x.float().exp()).bfloat16()]

    assert check(rounded, backend=in_float32).kind == check(rounded, backend=exact).kind == "ok"


def test_programs_are_reproducible_and_survive_json() -> None:
    for seed in range(20):
        one = grow(seed, OPERATIONS, list(RAISING), seed % 2 == 1)
        assert one == grow(seed, OPERATIONS, list(RAISING), seed % 2 == 1)
        assert one == Program.of_json(json.loads(json.dumps(one.as_json())))
        assert runs(one)
        compile(module(one, "cpu"), "module", "exec")


def test_loops_are_reproducible_and_survive_json() -> None:
    for seed in range(12):
        one = grow_loop(seed, seed % 2 == 1, seed % 3 == 1)
        assert one == grow_loop(seed, seed % 2 == 1, seed % 3 == 1)
        assert one == Program.of_json(json.loads(json.dumps(one.as_json())))
        assert runs(one)
        compile(module(one, "cpu"), "module", "exec")


def test_shrinking_takes_loops_apart() -> None:
    drawn = (grow_loop(seed, converted=True) for seed in range(200))
    one = next(p for p in drawn if any("while" in line for line in p.lines) and any("mul_" in line for line in p.lines))
    small = shrunk(one, lambda p: any("mul_" in line for line in p.lines))
    assert one.converted
    assert not small.converted
    assert not any("while" in line or "if" in line for line in small.lines)
    assert len(small.lines) < 5


def test_a_dynamic_program_is_called_with_another_length() -> None:
    one = next(p for p in map(grow_loop, range(50)) if p.dynamic)
    space = one.longer().load()
    assert space["make"]()[0].shape[0] == one.rows + 2
    seen: list[int] = []
    checked = check(one, backend=lambda gm, _: lambda *args: seen.extend(_rows(args)) or gm(*args))
    assert checked.kind == "ok"
    assert {one.rows, one.rows + 2} <= set(seen)


def _rows(args: Sequence[Any]) -> list[int]:
    return [x.shape[0] for x in args if isinstance(x, torch.Tensor) and x.dim() == 2]


def test_shrinking_keeps_the_failure() -> None:
    one = next(p for p in (grow(s, OPERATIONS) for s in range(200)) if any("tanh" in line for line in p.lines[:2]))
    small = shrunk(one, lambda p: "tanh" in " ".join(p.lines))
    assert len(small.lines) == len(small.outputs) == 1
    assert runs(small)


def test_a_worker_that_dies_is_a_finding_and_the_next_one_goes_on() -> None:
    worker = Worker("cpu")
    try:
        assert worker.check(program("v0 = __import__('os').abort()")).kind == "crash"
        assert worker.check(program("v0 = x0.missing()")) == Finding(
            "skipped", "eager: 'Tensor' object has no attribute 'missing'"
        )
    finally:
        worker.stop()


def test_operations_can_be_left_out() -> None:
    kept, raising = operations(frozenset({"scatter", "by_zero"}), "cpu")
    assert "scatter" not in {op.__name__ for op in kept}
    assert [op.__name__ for op in raising] == ["outside"]
    assert not operations(frozenset(), "cuda")[1]


TIES = program("v0 = x0.topk(3, 0)[0]", "v1 = x0.sort(1)[0]", "v2 = x0.kthvalue(2, 1)[0]", outputs=("v0", "v1", "v2"),
               base="randn(1, 6, 5).sign()", gradients=True)  # fmt: skip


def test_gradients_go_to_any_of_equal_elements() -> None:
    """Torch does not say which of them a sort or a selection takes; they go to no other ones, and they stay as they are."""

    def other_order(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with OtherOrder(torch.Generator().manual_seed(99)):
                return gm(*args)

        return call

    seen = [o.gradients[0] for k in range(9) for o in reordered(TIES, "cpu", k)]
    assert any(not torch.equal(one, seen[0]) for one in seen)
    assert check(TIES, backend=other_order).kind == "ok"
    assert check(TIES, backend=changed(lambda r: [2 * r[0] - r[0].detach(), *r[1:]])).kind == "values"
    assert (
        check(TIES, backend=changed(lambda r: [r[0] + 0 * r[1].sum(), r[1].roll(1, 1).roll(-1, 1), r[2] + 1e-4])).kind
        == "values"
    )
