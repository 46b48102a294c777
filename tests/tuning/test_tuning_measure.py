"""Benchmark jobs: what is timed, and what candidates may do without harm to anybody else."""

from __future__ import annotations

import gc
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F

from kgen.counters import counters
from kgen.host.graph_of_calls import graph_of_calls
from kgen.report.record import Record, recording
from kgen.tuning import measure as measuring
from kgen.tuning.benchmark import Array, BenchmarkJob, Setting, undisturbed
from kgen.tuning.measure import Failure, measure
from kgen.tuning.worker import difference

pytestmark = pytest.mark.cpu


def blueprint(f: Callable[..., Any], *args: torch.Tensor) -> bytes:
    torch._dynamo.reset()
    with recording() as seen, torch.no_grad():
        torch.compile(f, backend="kgen", options={"cache": False})(*args)
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    return pickle.dumps(graph.blueprint)


class Does:
    """A candidate that calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.does = function, args

    def __reduce__(self) -> Any:
        return self.does


X = torch.randn(16, 24)
RIGHT, SAME, WRONG = F.gelu, lambda x: F.gelu(x) * 1.0, F.relu


def benchmark(*more: bytes, seconds: float = 0.1) -> BenchmarkJob:
    """The reference, an equal of it, then others."""
    candidates = dict(enumerate([blueprint(RIGHT, X), blueprint(SAME, X), *more]))
    arguments = (Array((16, 24), (24, 1), torch.float32, "cpu"),)
    return BenchmarkJob("test", candidates, arguments, 0, seconds, 1e4, Setting(1, False, ()))


def test_times_of_all_that_are_right() -> None:
    heard: list[str] = []
    found = measure(benchmark(), heard.append)
    assert found.seconds.keys() == {0, 1}
    assert all(1e-8 < t < 1e-2 for t in found.seconds.values())
    assert found.failures == {}
    assert heard == ["0", "1"]


def test_a_wrong_result_never_wins() -> None:
    found = measure(benchmark(blueprint(WRONG, X)))
    assert found.seconds.keys() == {0, 1}
    assert found.failures[2].why == "wrong"
    assert "off by" in found.failures[2].text


def test_a_candidate_that_raises() -> None:
    found = measure(benchmark(pickle.dumps(Does(int, "no number"))))
    assert found.seconds.keys() == {0, 1}
    assert found.failures[2] == Failure("failed", "ValueError: invalid literal for int() with base 10: 'no number'")


def test_a_candidate_that_ends_its_process() -> None:
    before = counters.snapshot().get("tuning.lost", 0)
    found = measure(benchmark(pickle.dumps(Does(os._exit, 7)), pickle.dumps(Does(os.abort)), blueprint(SAME, X)))
    assert found.seconds.keys() == {0, 1, 4}
    assert found.failures[2] == Failure("crashed", "its process ended with status 7")
    assert found.failures[3] == Failure("crashed", "its process ended with signal 6")
    assert counters.snapshot()["tuning.lost"] == before + 2


def test_a_candidate_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RUN_LIMIT", 3.0)
    found = measure(benchmark(pickle.dumps(Does(time.sleep, 600))))
    assert found.seconds.keys() == {0, 1}
    assert found.failures[2] == Failure("hung", "no answer after 3 s")


def test_nothing_is_measured_without_the_reference() -> None:
    broken = benchmark()
    broken.candidates[0] = pickle.dumps(Does(os._exit, 1))
    found = measure(broken)
    assert found.seconds == {}
    assert found.failures.keys() == {0}


@pytest.mark.parametrize("warning", ["", "The CUDA Graph is empty. It was captured on a wrong stream.", "something else"])
def test_a_graph_without_calls_is_an_error(warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What launches on a stream of its own would be replayed in no time."""

    @contextmanager
    def recording(graph: Any) -> Iterator[None]:
        yield
        if warning:
            warnings.warn(warning, stacklevel=1)

    for name in ("Stream", "current_stream", "stream", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", recording)
    calls: list[int] = []
    if "empty" in warning:
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            graph_of_calls(lambda: calls.append(1))
    elif warning:
        with pytest.warns(UserWarning, match="something else"):
            graph_of_calls(lambda: calls.append(1))
    else:
        graph_of_calls(lambda: calls.append(1))
    assert len(calls) == 2  # once before


def test_what_a_recorded_graph_reads_lives_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled FlexAttention owns its table of blocks: freed, other tensors lay there, and it computed next to nothing."""

    class Owner:
        def __call__(self) -> None: ...

    for name in ("Stream", "current_stream", "stream", "synchronize", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    owner = Owner()
    alive = weakref.ref(owner)
    replay = graph_of_calls(owner)
    del owner
    gc.collect()
    replay()
    assert alive() is not None


def test_the_process_lasts_from_job_to_job() -> None:
    measure(benchmark())
    (worker,) = measuring._running
    measure(benchmark())
    assert measuring._running == [worker]
    measuring.stop()
    assert worker.process.poll() is not None


# ---- what counts as right ---------------------------------------------------------------------------------------------


def test_rounding_is_no_difference() -> None:
    x = torch.randn(300, 300)
    assert difference([x.bfloat16()], [(x * (1 + 1e-3)).bfloat16()]) == ""
    assert difference([x * (1 + 1e-6)], [x]) == ""
    assert "off by" in difference([x * 1.01], [x])


def test_one_row_of_garbage_is_a_difference() -> None:
    want = torch.randn(4096, 64).bfloat16()
    got = want.clone()
    got[-1] = torch.randn(64).bfloat16()
    assert "far off" in difference([got], [want])


def test_what_is_no_number() -> None:
    x = torch.randn(100)
    both = x.clone()
    both[3], both[4] = torch.nan, torch.inf
    assert difference([both.clone()], [both]) == ""
    assert "NaNs" in difference([both], [x])
    assert "NaNs" in difference([x], [both])


def test_integers_may_differ_in_few_places() -> None:
    x = torch.arange(10_000)
    close = x.clone()
    close[5] = 0
    assert difference([close], [x]) == ""
    assert "differs" in difference([x + 1], [x])
    assert "is torch.int64" in difference([x], [x.int()])


def test_arrays() -> None:
    generator = torch.Generator().manual_seed(0)
    made = Array((3, 4), (1, 5), torch.float16, "cpu", scale=0.1).make(generator)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (1, 5), torch.float16)
    indices = Array((1000,), (1,), torch.int64, "cpu", top=7).make(generator)
    assert set(indices.tolist()) == set(range(7))
    assert Array((0, 3), (3, 1), torch.float32, "cpu").make(generator).numel() == 0
    assert Array((50,), (1,), torch.uint8, "cpu").make(generator).max() <= 100


# ---- rounding on the way ----------------------------------------------------------------------------------------------


def test_the_narrowest_type_on_the_way_decides() -> None:
    x = torch.randn(300, 300)
    rounded = x.bfloat16().float()
    assert "off by" in difference([x], [rounded])
    assert difference([x], [rounded], [torch.bfloat16]) == ""
    assert "off by" in difference([x], [x * 1.08], [torch.bfloat16])


def test_a_share_of_numbers_of_one_size() -> None:
    made = Array((10_000,), (1,), torch.bfloat16, "cpu", scale=0.25, share=0.3).make(torch.Generator().manual_seed(0))
    assert set(made.tolist()) == {-0.25, 0.0, 0.25}
    assert 0.28 < (made != 0).float().mean().item() < 0.32
    assert abs(made.float().mean().item()) < 0.01
    assert set(Array((1000,), (1,), torch.float16, "cpu", share=1.0).make(torch.Generator()).tolist()) == {-1.0, 1.0}


def test_what_others_add_to_most_rounds_does_not_count() -> None:
    quiet, faster = [1.0, 1.01, 1.02], [0.9, 0.91, 0.92]
    assert undisturbed(quiet + [9.0] * 20) == pytest.approx(1.01, abs=0.02)
    assert undisturbed(faster + [18.0] * 40) < undisturbed(quiet * 10)
