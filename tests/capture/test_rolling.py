"""Unrolled loops with carried values, as `scan`: rewritten graphs in eager, with torch's gradients, and some through kgen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule

import kgen
from kgen.capture import rolling, torch_adapter
from kgen.capture.batching import batch_repeats
from kgen.capture.rolling import roll_repeats
from kgen.counters import counters
from kgen.verdict import Outcome, Reason, Verdict

T = 9


class Rewriting:
    """A back end that runs rewritten graphs operator by operator."""

    def __init__(self, least: int = 1) -> None:
        self.least = least
        self.verdicts: list[Verdict] = []
        self.before = self.after = 0

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before = len(gm.graph.nodes)
        batch_repeats(gm)
        self.verdicts = roll_repeats(gm, self.least)
        self.after = len(gm.graph.nodes)
        return aot_eager(gm, inputs)

    @property
    def loops(self) -> int:
        return sum(one.outcome is Outcome.ROLLED for one in self.verdicts)

    def refusals(self, reason: Reason) -> str:
        return "\n".join(one.detail for one in self.verdicts if one.reason is reason)


def tensors(*sizes: tuple[int, ...]) -> list[Tensor]:
    made = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, dtype=torch.float64, generator=made) * 0.4 for size in sizes]


def flat(results: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(results) if isinstance(one, Tensor)]


def same(f: Callable[..., Any], *args: Tensor, gradients: bool = True, least: int = 1) -> Rewriting:
    """Checks results, what has become of arguments, and gradients, against eager in float64."""
    backend = Rewriting(least)
    for wants in (False, True) if gradients else (False,):
        torch._dynamo.reset()
        mine, others = ([one.clone().requires_grad_(wants and one.is_floating_point()) for one in args] for _ in range(2))
        with torch.set_grad_enabled(wants):
            got, want = torch.compile(f, backend=backend, fullgraph=True)(*mine), f(*others)
        torch.testing.assert_close((got, mine), (want, others), rtol=1e-9, atol=1e-9)
        assert [one.requires_grad for one in flat(got)] == [one.requires_grad for one in flat(want)]
        assert [one.stride() for one in flat(got)] == [one.stride() for one in flat(want)]
        if wants:
            torch.testing.assert_close(_gradients(got, mine), _gradients(want, others), rtol=1e-8, atol=1e-8)
    return backend


def _gradients(results: Any, args: Sequence[Tensor]) -> list[Tensor | None]:
    loss = sum((one * (k + 1)).sin().sum() for k, one in enumerate(flat(results)) if one.requires_grad)
    wanted = [one for one in args if one.requires_grad]
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def rolled(f: Callable[..., Any], *args: Tensor, gradients: bool = True) -> Rewriting:
    found = same(f, *args, gradients=gradients)
    assert found.loops == 1, found.verdicts
    return found


def refused(f: Callable[..., Any], why: str, *args: Tensor, gradients: bool = True) -> None:
    found = same(f, *args, gradients=gradients)
    assert found.loops == 0
    assert why in found.refusals(Reason.UNROLLED), found.verdicts


RNN = ((3, T, 4), (4, 5), (5, 5), (5,))


# ---- what becomes a loop -----------------------------------------------------------------------------------------------


def rnn(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h, rows = x.new_zeros(x.shape[0], u.shape[0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w + h @ u + b)
        rows.append(h)
    return torch.stack(rows, 1), h


def backwards(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = x.new_zeros(x.shape[0], u.shape[0])
    for t in reversed(range(x.shape[1])):
        h = torch.tanh(x[:, t] @ w + h @ u + b)
    return h


def first_is_another(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = None
    for t in range(x.shape[1]):
        step = x[:, t] @ w + b
        h = torch.tanh(step if h is None else step + h @ u)
    return h


def last_is_another(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = x.new_zeros(x.shape[0], u.shape[0])
    for t in range(x.shape[1]):
        h = x[:, t] @ w + h @ u
        h = h + b if t == x.shape[1] - 1 else torch.tanh(h)
    return h


def unbound(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h, rows = x.new_zeros(x.shape[0], u.shape[0]), []
    for one in x.unbind(1):
        h = torch.tanh(one @ w + h @ u + b)
        rows.append(h)
    return rows[0], rows[3], rows[-1], torch.stack(rows)


def parts(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = x.new_zeros(x.shape[0], u.shape[0])
    for one in [part.squeeze(1) + 1 for part in x.split(1, dim=1)]:
        h = torch.sin(one @ w + h @ u + b)
    return h


def two_back(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = before = x[:, 0] @ w
    for t in range(1, x.shape[1]):
        h, before = torch.sin(h @ u + before * 0.5 + x[:, t] @ w + b), h
    return h, before


def numbered(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = x[:, 0] @ w
    for t in range(x.shape[1]):
        h = torch.cos(h @ u * (t + 1) + b) - 0.25 * t
    return h


def invariant_state(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = x[:, 0] @ w
    for _ in range(12):
        h = torch.tanh(h @ u) + b
    return h


def memory_of_an_iteration(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = x.new_zeros(x.shape[0], u.shape[0])
    for t in range(x.shape[1]):
        made = x[:, t] @ w + h @ u
        made[:, 1] = made[:, 0] * 2
        made.mul_(0.5)
        h = torch.tanh(made + b)
    return h


def writes_that_nothing_reads(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = x.new_zeros(x.shape[0], u.shape[0])
    for t in range(x.shape[1]):
        made = x[:, t] @ w + h @ u
        torch.nn.functional.relu(made, inplace=True)
        made @ u
        h = torch.sin(made + b)
    return h


PROGRAMS = (
    rnn, backwards, first_is_another, last_is_another, unbound, parts, two_back, numbered, invariant_state,
    memory_of_an_iteration, writes_that_nothing_reads,
)  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_loops(f: Callable[..., Any]) -> None:
    rolled(f, *tensors(*RNN))


def lstm(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    h = c = x.new_zeros(x.shape[0], u.shape[0])
    rows = []
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ w + h @ u + b).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        rows.append(h)
    return torch.stack(rows), h, c


LSTM = ((3, T, 4), (4, 20), (5, 20), (20,))


def test_lstm() -> None:
    found = rolled(lstm, *tensors(*LSTM))
    assert found.after < 25 < 19 * T < found.before


def test_decoder_with_attention() -> None:
    def decode(keys: Tensor, w: Tensor, u: Tensor) -> Any:
        h, rows = keys[:, 0], []
        for _ in range(T):
            weights = torch.softmax((keys @ (h @ w).unsqueeze(2)).squeeze(2), 1)
            h = torch.tanh((weights.unsqueeze(1) @ keys).squeeze(1) + h @ u)
            rows.append(h)
        return torch.stack(rows, 1)

    rolled(decode, *tensors((3, 6, 4), (4, 4), (4, 4)))


def test_integers_are_carried() -> None:
    def greedy(table: Tensor, w: Tensor) -> Any:
        token, h, tokens = torch.zeros(3, dtype=torch.int64), table.new_zeros(3, 4), []
        for _ in range(T):
            h = torch.tanh(h @ w + table[token])
            token = (h @ table.t()).argmax(1)
            tokens.append(token)
        return torch.stack(tokens, 1), h

    rolled(greedy, *tensors((7, 4), (4, 4)), gradients=False)


def test_weights_that_share_memory() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        h = c = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h, c = torch.tanh(h @ w[:, :4] + x[:, t]), torch.tanh(c @ w[:, 4:] + h)
        return h, c

    rolled(f, *tensors((3, T, 4), (4, 8)))


def test_two_loops() -> None:
    def f(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
        rows, _ = rnn(x, w, u, b)
        h = x.new_zeros(x.shape[0], u.shape[0])
        for t in range(x.shape[1]):
            h = torch.sin(rows[:, t] * h + b)
        return h

    assert same(f, *tensors(*RNN)).loops == 2


def test_what_does_not_depend_on_carried_values_is_one_matmul() -> None:
    found = rolled(rnn, *tensors(*RNN), gradients=False)
    assert "2 more for all iterations at once" in found.verdicts[-1].detail


def test_nodes_do_not_grow() -> None:
    counts = {same(rnn, *tensors((3, steps, 4), *RNN[1:]), gradients=False).after for steps in (8, 16, 40)}
    assert len(counts) == 1


# ---- drawn programs ----------------------------------------------------------------------------------------------------

Statement = tuple[str, int, int, int]
UNROLLED: tuple[int, ...] = ()
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "gate": lambda a, b: torch.sigmoid(a) * b,
    "mean": lambda a, b: (a - b) * 0.5,
    "larger": torch.maximum,
}
READS = ("row", "last_first", "next", "number", "matmul", "fixed")


def drawn(seed: int) -> tuple[Callable[..., Any], int]:
    """A loop with one to three carried values, and the number of its iterations."""
    pick = random.Random(seed)
    states, steps = pick.randint(1, 3), pick.randint(5, 9)
    kinds = (*READS, *BINARY)
    body: list[Statement] = [
        (pick.choice(kinds), pick.randrange(8), pick.randrange(8), pick.randrange(states)) for _ in range(pick.randint(3, 7))
    ]
    every, skips, ends, last = pick.random() < 0.5, pick.random() < 0.3, pick.random() < 0.3, pick.random() < 0.5

    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        carried = [b * (k + 1) + x[0] for k in range(states)]
        rows = []
        for t in range(steps):
            made = list(carried)
            for kind, left, right, state in body:
                made.append(_value(kind, made[left % len(made)], made[right % len(made)], x, w, b, t, steps))
                if not (skips and t == 0):
                    carried[state] = torch.tanh(made[-1])
            if ends and t == steps - 1:
                carried[0] = carried[0].exp()
            rows.append(carried[-1])
        results = [torch.stack(rows)] if every else rows[1:3]
        return results, carried if last else carried[0]

    return f, steps


def _value(kind: str, left: Tensor, right: Tensor, x: Tensor, w: Tensor, b: Tensor, t: int, steps: int) -> Tensor:
    if kind in BINARY:
        return BINARY[kind](left, right)
    row = {"row": x[t], "last_first": x[steps - 1 - t], "next": x[t + 1]}.get(kind)
    if row is not None:
        return left * row
    return {"number": left * (t + 1), "matmul": left @ w, "fixed": left + b}[kind]


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_programs(seed: int) -> None:
    f, steps = drawn(seed)
    found = same(f, *tensors((steps + 1, 3, 4), (4, 4), (3, 4)), gradients=seed % 2 == 0)
    assert (found.loops > 0) == (seed not in UNROLLED), found.verdicts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_drawn_programs(seed: int) -> None:
    f, steps = drawn(seed)
    same(f, *tensors((steps + 1, 3, 4), (4, 4), (3, 4)))


# ---- what stays unrolled -----------------------------------------------------------------------------------------------


def test_random_numbers() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(T):
            x = torch.tanh(torch.nn.functional.dropout(x, 0.0 if torch.is_grad_enabled() else 0.5) @ w)
        return x

    backend = Rewriting()
    with torch.no_grad():
        torch.compile(f, backend=backend)(*tensors((3, 4), (4, 4)))
    assert "draws random numbers" in backend.refusals(Reason.UNROLLED)
    assert not backend.loops


def test_writes_into_what_is_carried() -> None:
    def carried(x: Tensor, b: Tensor) -> Tensor:
        h = torch.tanh(b)
        for t in range(1, T):
            old, h = h, torch.tanh(h + x[t])
            old.mul_(2)
        return h.sum(0)

    refused(carried, "shares other memory in other iterations", *tensors((T, 3, 4), (3, 4)), gradients=False)


def test_sizes_that_differ() -> None:
    def f(x: Tensor, b: Tensor) -> Tensor:
        h = b
        for t in range(T):
            h = torch.cat((torch.tanh(h), x[t]))
        return h

    assert same(f, *tensors((T, 3, 4), (3, 4))).loops == 0


def test_results_that_share_memory() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        h, rows = x[0], []
        for t in range(T):
            made = h @ w + x[t]
            h = made[:, :4].view(3, 4) if w.shape[1] == 4 else made
            h = torch.tanh(h)
            rows += [h, h.view(4, 3)]
        return rows

    refused(f, "shares memory", *tensors((T, 3, 4), (4, 4)))


def test_results_without_gradients() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        h, rows = x[0], []
        for t in range(T):
            h = torch.tanh(h @ w + x[t])
            rows.append(h.detach() * 2)
        return h, torch.stack(rows)

    refused(f, "wants gradients otherwise", *tensors((T, 3, 4), (4, 4)))


def test_large_tensors_of_each_iteration() -> None:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w)
        return x

    refused(f, "would be copied", *tensors((3, 160), *[(160, 160)] * T), gradients=False)
    assert same(f, *tensors((3, 4), *[(4, 4)] * T)).loops == 1


def test_gradients_that_are_switched() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(T):
            with torch.no_grad():
                w = w * 0.5
            x = torch.tanh(x @ w)
        return x

    assert same(f, *tensors((3, 4), (4, 4))).loops == 0


def test_a_torch_whose_scan_has_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that want gradients stay unrolled; what is computed without them does not."""
    monkeypatch.setattr(torch_adapter, "has_right_scan", lambda: False)
    x, h, w = tensors((T, 2, 3), (2, 3), (3, 3))

    def f(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
        for t in range(T):
            h = torch.tanh(x[t] + h @ w)
        return h

    assert "are wrong" in same(f, x, h, w).refusals(Reason.UNROLLED)
    assert same(f, x, h, w, gradients=False).loops == 1


def test_short_loops() -> None:
    found = same(rnn, *tensors(*RNN), gradients=False, least=512)
    assert not found.loops
    assert f"{T} iterations" in found.refusals(Reason.SHORT_LOOP)


def poles(x: Tensor, v: Tensor) -> Tensor:
    for _ in range(24):
        force = torch.where(x > 0, -x.sin(), x.cos() * 0.5)
        v = (v + 0.02 * force - 0.01 * v.abs() * v).clamp(-3, 3)
        x = x + 0.02 * v * torch.tanh(v)
        x = torch.where(x.abs() > 2.4, x * 0.05, x)
    return x + v


def with_a_sum(x: Tensor, v: Tensor) -> Tensor:
    for _ in range(24):
        force = torch.where(x > 0, -x.sin(), x.cos() * 0.5)
        v = (v + 0.02 * force - 0.01 * v.abs() * v).clamp(-3, 3)
        x = x + 0.02 * v * torch.tanh(v) * x.square().mean()
        x = torch.where(x.abs() > 2.4, x * 0.05, x)
    return x + v


@pytest.mark.parametrize(("fn", "loops"), [(poles, 0), (with_a_sum, 1)])
def test_a_few_iterations_of_points(fn: Callable[..., Tensor], loops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are one kernel unrolled, which keeps what they carry in registers."""
    monkeypatch.setattr(rolling, "LEAST_NODES", 300)
    assert same(fn, *tensors((33,), (33,)), gradients=False, least=300).loops == 1
    monkeypatch.setattr(rolling, "UNROLLED_ON", {"cpu"})
    assert same(fn, *tensors((33,), (33,)), gradients=False, least=300).loops == loops


# ---- through kgen ------------------------------------------------------------------------------------------------------


def compiled(f: Callable[..., Any], args: Sequence[Tensor], rolling: str, gradients: bool) -> tuple[list[Any], dict[str, int]]:
    torch._dynamo.reset()
    counters.reset()
    given = [one.to(torch.float32).requires_grad_(gradients) for one in args]
    with torch.set_grad_enabled(gradients):
        run = torch.compile(f, backend="kgen", fullgraph=True, options={"loop_rolling": rolling, "strict": True})
        results = run(*given)
        made = [*flat(results), *(_gradients(results, given) if gradients else ())]
    return made, counters.snapshot()


@pytest.mark.cpu
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_do_not_grow(gradients: bool) -> None:
    kernels = set()
    for steps in (6, 18):
        args = tensors((3, steps, 4), *LSTM[1:])
        got, counted = compiled(lstm, args, "on", gradients)
        wanted = [one.clone().requires_grad_(gradients) for one in args]
        results = lstm(*wanted)
        want = [*flat(results), *(_gradients(results, wanted) if gradients else ())]
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
        assert counted["extern.scan"] == 1 + gradients
        kernels.add(counted["kernels"])
    assert len(kernels) == 1


def fallen(x: Tensor, w: Tensor) -> Tensor:
    """Positions and speeds under forces, joined: their gradients are parts of one tensor."""
    speed, place = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for k in range(x.shape[1]):
        force = torch.tanh(speed @ w + x[:, k])
        speed, place = speed + force * 0.1, place + speed * 0.1 + force * 0.005
    return torch.cat([speed, place], 1)


@pytest.mark.cpu
def test_gradients_that_share_memory() -> None:
    args = tensors((3, 12, 4), (4, 4))
    got, counted = compiled(fallen, args, "on", True)
    wanted = [one.clone().requires_grad_() for one in args]
    result = fallen(*wanted)
    for one, other in zip(got, [result, *_gradients(result, wanted)], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert counted["extern.scan"] == 2


@pytest.mark.cpu
def test_the_option() -> None:
    _, counted = compiled(rnn, tensors(*RNN), "off", False)
    assert "extern.scan" not in counted
    _, counted = compiled(rnn, tensors(*RNN), "auto", False)
    assert "extern.scan" not in counted
    _, counted = compiled(rnn, tensors((3, 128, 4), *RNN[1:]), "auto", False)
    assert counted["extern.scan"] == 1


@pytest.mark.cpu
def test_explain() -> None:
    with torch.no_grad(), kgen.config.override(loop_rolling="on"):
        text = str(kgen.explain(rnn, *(one.float() for one in tensors(*RNN))))
    assert f"a loop again because {Reason.CARRIED_ITERATIONS.value}" in " ".join(text.split())
