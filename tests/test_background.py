"""The option tuning="background": who answers first, what takes over, and what stays as it is."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import kgen
from kgen import background, errors
from kgen.capture.packed_graph import NotPackable, packed, signature, unpacked
from kgen.config import Config, from_call
from kgen.counters import counters
from kgen.tuning.entry import Entry, Key, now
from kgen.tuning.loop_tuner import LoopTuner
from kgen.tuning.store import stores
from kgen.tuning.tuner import Tuner

pytestmark = pytest.mark.cpu

SECONDS = 60.0


@pytest.fixture(autouse=True)
def fresh(fresh_graphs: Path) -> Iterator[None]:
    torch._dynamo.reset()
    counters.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def f(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w).sum(1)


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(24, 40), torch.randn(40, 16)


def compiled(function: Any = f, **how: Any) -> Any:
    return torch.compile(function, backend="kgen", options={"tuning": "background", **how.pop("options", {})}, **how)


def measures(config: Config) -> None:
    """As if something had been measured."""
    stores(config).add([Entry(Key("GPU 1", "form", (("m", 1),), title="mm"), "t", "1", (), 1e-3, 1e-3, 2, now(), "test")])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[background.Job]:
    """The jobs that another process would get; it finds something for each."""
    found: list[background.Job] = []

    def ask(_: Any, job: background.Job) -> dict[str, Any]:
        found.append(job)
        measures(job.config)
        return {"answered": 1}

    monkeypatch.setattr(background._Thread, "ask", ask)
    return found


# ---- what takes over ----------------------------------------------------------------------------------------------------


def test_a_better_graph_takes_over(asked: list[background.Job]) -> None:
    args, g = operands(), compiled()
    torch.testing.assert_close(g(*args), f(*args))
    assert kgen.wait_for_tuning(SECONDS)
    assert (counters["background.tuned"], counters["lowered"], len(asked)) == (1, 2, 1)
    assert asked[0].config.mode == "max-autotune-no-cudagraphs"
    torch.testing.assert_close(g(*args), f(*args))
    assert counters["lowered"] == 2, "once for each graph"


def test_forward_and_backward(asked: list[background.Job]) -> None:
    x, w = (one.requires_grad_() for one in operands())
    g = compiled()
    wanted = torch.autograd.grad(f(x, w).square().sum(), (x, w))
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(g(x, w).square().sum(), (x, w)), wanted, rtol=1e-4, atol=1e-3)
        assert kgen.wait_for_tuning(SECONDS)
    assert {job.info.role for job in asked} == {"forward", "backward"}
    assert counters["background.tuned"] == 2


def test_writes_into_inputs_are_those_of_eager(asked: list[background.Job]) -> None:
    def step(state: Tensor, x: Tensor, w: Tensor) -> Tensor:
        state.add_(x @ w)
        return state.sum(1)

    (x, w), g = operands(), compiled(step)
    mine, theirs = torch.zeros(24, 16), torch.zeros(24, 16)
    for _ in range(3):
        torch.testing.assert_close(g(mine, x, w), step(theirs, x, w))
        torch.testing.assert_close(mine, theirs)
        assert kgen.wait_for_tuning(SECONDS)
    assert counters["background.tuned"] == 1


def test_threads_call_meanwhile(asked: list[background.Job]) -> None:
    args, g, wrong = operands(), compiled(), []
    wanted, done = f(*args), threading.Event()
    g(*args)

    def call() -> None:
        while not done.is_set():
            if not torch.allclose(g(*args), wanted, atol=1e-4):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for one in threads:
        one.start()
    assert kgen.wait_for_tuning(SECONDS)
    done.set()
    for one in threads:
        one.join()
    assert counters["background.tuned"] == 1
    assert not wrong


def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[background.Job]:
    """The jobs; what the other process does for one is done in this one."""
    found: list[background.Job] = []

    def ask(_: Any, job: background.Job) -> dict[str, Any]:
        found.append(job)
        measures(job.config)
        place = tmp_path / str(len(found)) / "job"
        place.parent.mkdir()
        place.write_bytes(pickle.dumps(job))
        reply = background.reply_to(place)
        made = background._result(place)
        return {**reply, "answered": 1, "graph": made.read_bytes()}

    for tuner in (Tuner, LoopTuner):
        monkeypatch.setattr(tuner, "_measure", lambda *_: None)
    monkeypatch.setattr(background._Thread, "ask", ask)
    return found


def test_the_other_process_hands_over_what_it_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled again in this one, it would take Python's lock from the caller for as long as the first time."""
    asked, args, g = here(monkeypatch, tmp_path), operands(), compiled()
    monkeypatch.setattr(background, "_serialized", _marked(background._serialized))
    g(*args)
    monkeypatch.setattr(
        background.Job, "compiled", lambda job: pytest.fail("compiled here") if len(asked) > 1 else COMPILED(job)
    )
    assert kgen.wait_for_tuning(SECONDS)
    assert (counters["background.tuned"], counters["background.failed"], len(asked)) == (1, 0, 1)
    torch.testing.assert_close(g(*args), f(*args))


COMPILED = background.Job.compiled


def _marked(serialized: Any) -> Any:
    """Two processes make the same of what neither has measured; here they differ."""
    seen: list[Any] = []

    def other(graph: Any) -> bytes | None:
        seen.append(graph)
        data = serialized(graph)
        return data if len(seen) == 1 else b"another " + data

    return other


def test_a_later_process_begins_with_what_was_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, args = here(monkeypatch, tmp_path), operands()
    for _ in range(3):
        torch.testing.assert_close(compiled()(*args), f(*args))
        assert kgen.wait_for_tuning(SECONDS)
        torch._dynamo.reset()
    assert len(asked) == 1
    assert counters["background.known"] == 1
    assert counters["aot_cache_hit"] == 1, "the second one is kept"


def test_what_was_measured_and_is_gone_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, args = here(monkeypatch, tmp_path), operands()
    note = background._note_tuned
    monkeypatch.setattr(background, "_note_tuned", lambda job, found: note(job, dict.fromkeys(found, True)))
    for _ in range(2):
        compiled()(*args)
        assert kgen.wait_for_tuning(SECONDS)
        torch._dynamo.reset()
    assert len(asked) == 2
    assert counters["background.known"] == 0


def test_the_first_call_answers_before_anything_begins(asked: list[background.Job], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    put = background._Thread.put
    monkeypatch.setattr(background._Thread, "put", lambda self, graph: (order.append("asked"), put(self, graph)))
    run = background.Improving.__call__

    def call(self: background.Improving, args: list[Any]) -> Any:
        inner = self.graph
        self.graph = lambda given: (inner(given), order.append("answered"))[0]  # type: ignore[assignment]
        try:
            return run(self, args)
        finally:
            self.graph = inner

    monkeypatch.setattr(background.Improving, "__call__", call)
    compiled()(*operands())
    assert order == ["answered", "asked"]
    assert kgen.wait_for_tuning(SECONDS)


def test_nothing_begins_while_graphs_are_compiled(asked: list[background.Job]) -> None:
    with background.BUSY.working():
        compiled()(*operands())
        assert not kgen.wait_for_tuning(2 * background.QUIET)
        assert asked == []
    assert kgen.wait_for_tuning(SECONDS)
    assert len(asked) == 1


def test_loop_kernels_are_tuned_too(asked: list[background.Job]) -> None:
    compiled(lambda x: torch.softmax(x, 1))(torch.randn(256, 1024))
    assert kgen.wait_for_tuning(SECONDS)
    assert len(asked) == 1


# ---- what stays ---------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("why", ["unchanged", "failed", "failed at once", "refused"])
def test_graphs_that_stay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: Any, job: background.Job) -> dict[str, Any]:
        if why == "failed at once":
            raise OSError("no process")
        return {"failed": "no GPU"} if why == "failed" else {"answered": int(why == "refused")}

    monkeypatch.setattr(background._Thread, "ask", ask)
    args, g = operands(), compiled()
    if why == "refused":
        take_over = background.Improving._take_over
        monkeypatch.setattr(background.Improving, "_take_over", lambda self, better: take_over(self, _Restrided(better)))
    g(*args)
    assert kgen.wait_for_tuning(SECONDS)
    assert counters[f"background.{why.split(' ')[0]}"] == 1
    assert counters["background.tuned"] == 0
    torch.testing.assert_close(g(*args), f(*args))


class _Restrided:
    """A graph whose results lie otherwise in memory."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.output_strides = graph, ((7,),)


def test_what_is_not_tuned(asked: list[background.Job]) -> None:
    args = operands()
    compiled(dynamic=True)(*args)  # sizes are not numbers
    assert counters["background.refused"] == 1
    compiled(lambda x: x + 1)(*args[:1])  # nothing to measure
    with kgen.forbid_fused("aten.mm", "aten.relu"):
        compiled(lambda x, w: torch.relu(x @ w))(*args)
    assert kgen.wait_for_tuning(SECONDS)
    assert asked == []


def test_a_graph_that_is_tuned_is_not_kept_on_disk(asked: list[background.Job]) -> None:
    """Another process would find it untuned, and stay so."""
    args = operands()
    for _ in range(2):
        compiled()(*args)
        assert kgen.wait_for_tuning(SECONDS)
        torch._dynamo.reset()
    assert counters["aot_cache_hit"] == 0
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("other", "wanted"), [({"mode": "max-autotune"}, "default mode"), ({"freezing": True}, "freezing=False"),
                          ({"measurements": False}, "measurements=True"), ({"gpu_interpreter": True}, "gpu_interpreter=False")],
)  # fmt: skip
def test_options_that_contradict(other: dict[str, Any], wanted: str) -> None:
    with pytest.raises(errors.BadOptionValue, match=wanted):
        from_call(None, {"tuning": "background", **other})


# ---- packed graphs ------------------------------------------------------------------------------------------------------


def test_a_packed_graph_is_the_same() -> None:
    def traced(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.max.dim(x.t() @ x, 1)

    gm, x = make_fx(traced, tracing_mode="fake")(torch.empty(5, 3)), torch.randn(5, 3)
    again = unpacked(packed(gm))
    assert [node.target for node in again.graph.nodes] == [node.target for node in gm.graph.nodes]
    assert [tuple(node.meta["val"].stride()) for node in again.graph.nodes if isinstance(node.meta.get("val"), Tensor)] == [
        tuple(node.meta["val"].stride()) for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor)
    ]
    torch.testing.assert_close(again(x), traced(x))


def test_a_signature_tells_graphs_apart() -> None:
    def of(function: Any, *sizes: tuple[int, ...]) -> str:
        return signature(make_fx(function, tracing_mode="fake")(*map(torch.empty, sizes)))

    assert of(f, (5, 3), (3, 2)) == of(f, (5, 3), (3, 2))
    assert len({of(f, (5, 3), (3, 2)), of(f, (4, 3), (3, 2)), of(lambda x, w: (x @ w).relu().sum(0), (5, 3), (3, 2))}) == 3


def test_symbolic_sizes_are_not_packed() -> None:
    gm: GraphModule = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.empty(5, 3))
    with pytest.raises(NotPackable, match="not numbers"):
        packed(gm)


# ---- the other process --------------------------------------------------------------------------------------------------


def test_the_process_answers_and_ends(tmp_path: Path) -> None:
    from kgen.build import child

    process = child.start(background.CHILD, without=())
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{tmp_path / 'nothing'}\n".encode())
    process.stdin.flush()
    assert process.stdout.readline() == b"{}\n"
    assert b"FileNotFoundError" in process.stdout.readline()
    process.stdin.close()
    assert process.wait(SECONDS) == 0
    process.stdout.close()


@pytest.mark.slow
def test_choices_are_measured_meanwhile() -> None:
    args = torch.randn(300, 257), torch.randn(257, 130)
    g = compiled(options={"tuning_seconds": 120.0})
    torch.testing.assert_close(g(*args), f(*args))
    assert kgen.wait_for_tuning(600)
    torch.testing.assert_close(g(*args), f(*args))
    assert counters["background.tuned"] == 1
    assert stores(from_call()).files[0].entries()
