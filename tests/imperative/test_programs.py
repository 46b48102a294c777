"""`kgen.control_flow`: programs against eager in float64, what they cost, and what is refused."""

from __future__ import annotations

import copy
import cProfile
import os
import pstats
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from imperative.programs import PROGRAMS
from torch import Tensor

import kgen
from kgen import errors
from kgen.counters import counters

pytestmark = pytest.mark.cpu

# The others take as long to compile, and run with the slow tests.
QUICK = (
    "writes_through_views",
    "names_of_views",
    "turned",
    "one_column",
    "two_insertions",
    "counted_in_a_loop",
    "carried_rows",
    "first_large",
    "write_else",
    "until_large",
    "suppression",
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def marked(name: str) -> Any:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", map(marked, PROGRAMS))
def test_programs(name: str) -> None:
    function, arguments, _ = PROGRAMS[name]
    args = arguments()
    wanted_args, got_args = copy.deepcopy(args), copy.deepcopy(args)
    wanted = function(*wanted_args)
    torch.testing.assert_close(kgen.control_flow(function, dynamic=True)(*got_args), wanted)
    torch.testing.assert_close(got_args, wanted_args)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, _, gradients) in PROGRAMS.items() if gradients])
def test_gradients(name: str) -> None:
    function, arguments, _ = PROGRAMS[name]
    args = arguments()

    def gradients(f: Callable[..., Tensor]) -> Any:
        given = [one.clone().requires_grad_() if isinstance(one, Tensor) else one for one in args]
        return torch.autograd.grad(f(*given).sum(), [one for one in given if isinstance(one, Tensor)])

    torch.testing.assert_close(gradients(kgen.control_flow(function, dynamic=True)), gradients(function))


# ---- what it costs -----------------------------------------------------------------------------------------------------


@kgen.control_flow(dynamic=True)
def get_started(b, n):
    for i in range(n):
        b[i] = b[i] + 1
    return b


def test_independent_rows_are_one_kernel_for_all_counts() -> None:
    b = torch.zeros(100, 4)
    for n in range(2, 23):
        get_started(b, n)
    assert b[:, 0].tolist()[:3] == [21, 21, 20]
    assert (counters["kernels"], counters["graphs"], counters["extern.while_loop"]) == (1, 1, 0)


def test_rows_beyond_the_buffer_raise_as_in_eager() -> None:
    with pytest.raises(IndexError):
        get_started(torch.zeros(5, 4), 6)


@kgen.control_flow(dynamic=True)
def running_sum(b, n):
    for i in range(1, n):
        b[i] = b[i] + b[i - 1]
    return b


def _bytes_allocated(call: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())


def test_carried_buffers_are_written_in_place_without_python() -> None:
    b = torch.ones(4096, 64)
    running_sum(b, 3)
    pointer = b.data_ptr()
    assert _bytes_allocated(lambda: running_sum(b, 200)) < b.nbytes // 8
    assert running_sum(b, 3).data_ptr() == pointer
    few, many = (_calls(lambda n=n: running_sum(b, n)) for n in (100, 2000))
    assert few == many  # the profile counts Python's calls, and those of functions in C


def _calls(call: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(call)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


# ---- what is refused ---------------------------------------------------------------------------------------------------


def refused(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(errors.NotConvertible) as caught:
        kgen.control_flow(function)(*args)
    assert "test_programs.py, line" in str(caught.value)
    return str(caught.value)


def test_a_generator_is_refused() -> None:
    def rows(x):
        yield x

    assert "generator" in refused(rows)


def test_a_loop_with_an_else_part_is_refused() -> None:
    def searched(x):
        while x.sum() > 0:
            x = x - 1
        else:  # noqa: PLW0120
            x = x + 1
        return x

    assert "`else`" in refused(searched)


def test_an_index_behind_its_loop_is_refused() -> None:
    def last(x, n):
        for i in range(n):
            x[i] = 0
        return i

    assert "i is read behind its loop" in refused(last)


def test_a_variable_of_one_branch_is_refused() -> None:
    def half(x):
        if x.sum() > 0:
            y = x + 1
        return y

    assert "data decide what y is" in refused(half, torch.ones(3))


def test_a_variable_whose_sizes_change_is_refused() -> None:
    def grown(x):
        while x.sum() < 100:
            x = torch.cat([x, x])
        return x

    assert "the loop changes what x is" in refused(grown, torch.ones(3))


def test_a_write_into_what_is_assigned_anew_is_refused() -> None:
    def both(x):
        while x.sum() < 100:
            x[0] = 1
            x = x * 2
        return x

    assert "written in place and assigned anew" in refused(both)


def test_a_view_that_leaves_a_loop_is_refused() -> None:
    def row(b):
        last = b[0]
        while b.sum() < 100:
            b[1] += 1
            last = b[1]
        return last

    assert ".clone()" in refused(row, torch.ones(3, 4))


def test_a_view_at_an_index_of_a_tensor_is_refused_where_writes_matter() -> None:
    """Such a view is a copy. Without these refusals, the write or the new value is lost."""

    def write(b, i):
        while i < 3:
            row = b[i]
            row[1] = 3
            i = i + 1
        return b

    def swap(b, i):
        while i < 3:
            row = b[i]
            b[i] = b[i + 1]
            b[i + 1] = row
            i = i + 1
        return b

    def earlier(b, i):
        row = b[i]
        seen = row + 1
        while i < 3:
            seen = row + seen
            b[i] = 0
            i = i + 1
        return seen

    for function in (write, swap, earlier):
        assert "row is a view at an index that data decide" in refused(function, torch.ones(5, 4), torch.tensor(0))


def test_views_that_an_assignment_writes_before_it_reads_them_are_refused() -> None:
    """In eager the second write reads what the first one has written."""

    def exchange(b, i):
        while i < 3:
            b[i], b[i + 1] = b[i + 1], b[i]
            i = i + 1
        return b

    def named(b, i):
        while i < 3:
            row = b[i]
            b[i], b[i + 1] = 0, row
            i = i + 1
        return b

    def others(b, i):
        c = b * 2
        while i < 3:
            b[i], b[i + 1] = c[i + 1], b[i] + 1
            i = i + 1
        return b

    assert "b[i] is a view at an index that data decide" in refused(exchange, torch.ones(5, 4), torch.tensor(0))
    assert "row is a view at an index that data decide" in refused(named, torch.ones(5, 4), torch.tensor(0))
    b, i = torch.randn(5, 4), torch.tensor(0)
    got = torch.compile(kgen.control_flow(others), backend="kgen", options={"strict": True})(b.clone(), i)
    torch.testing.assert_close(got, others(b.clone(), i))


def test_a_list_that_a_loop_appends_to_is_refused() -> None:
    def listed(x):
        made = []
        while x.sum() < 100:
            x = x * 2
            made.append(x)
        return made

    assert "appends to" in refused(listed, torch.ones(3))


def test_what_dynamo_cannot_trace_names_the_block() -> None:
    def printed(x):
        while x.sum() < 100:
            x = x * 2
            os.getpid()
        return x

    assert "cannot trace the block" in refused(printed, torch.ones(3))


def test_gradients_through_a_loop_that_data_end_are_refused() -> None:
    def doubled(x):
        while x.sum() < 100:
            x = x * 2
        return x

    assert "gradients" in refused(doubled, torch.ones(3, requires_grad=True))


def test_functions_without_source_are_refused() -> None:
    with pytest.raises(errors.NoSource):
        kgen.control_flow(eval("lambda x: x"))


def test_functions_made_outside_of_a_block_are_refused() -> None:
    def captured(x):
        scale = 1.0
        grown = lambda: x * scale  # noqa: E731
        while x.sum() < 100:
            scale = scale * 2
            x = grown()
        return x

    assert "read by a function" in refused(captured)


class Counter:
    def __init__(self, step: int) -> None:
        self.step = step

    def up_to(self, x: Tensor, most: int) -> Tensor:
        while x.sum() < most:
            x = x + self.step
        return x


def test_methods_by_way_of_compile() -> None:
    x = torch.zeros(4)
    compiled = kgen.compile(Counter(2).up_to, control_flow=True, options={"cache": False})
    assert torch.equal(compiled(x, 20), Counter(2).up_to(x, 20))
    assert torch.equal(kgen.compile(control_flow=True)(Counter(3).up_to)(x, 20), Counter(3).up_to(x, 20))


def test_modules_are_told_what_to_decorate() -> None:
    with pytest.raises(errors.NoSource, match="decorate its `forward`"):
        kgen.compile(torch.nn.Linear(2, 2), control_flow=True)
