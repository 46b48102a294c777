"""Runs the barriers of a kernel in Gluon without a GPU: does every warp group come to its end, in whichever order they run?

Triton's interpreter does not run Gluon, and a compiler does not see that two warp groups wait for each other. Here each
group is a thread of Python that runs the kernel's text, and `warp_groups.py` beside it, with numbers for what decides
where it goes (sizes, loops, parities) and `Anything` for tiles. One of them runs at a time, up to its next barrier; which one
is drawn. Whether memory is read too late, or written too early, is not seen.
"""

from __future__ import annotations

import ast
import inspect
import math
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kgen.rendered.gpu_kernel import TritonKernel
from kgen.templates import triton as templates
from tests.tile_sums import TileSums

BITS = re.compile(r"tensordesc<[a-z]+(\d+)\w*\[([\d, ]+)\]>")
# What of `warp_groups` has to do with barriers, or with the memory that they guard.
PROTOCOL = (
    "barriers", "await_free", "await_ready", "pingpong_wait", "pingpong_arrive", "release", "release_read", "expect", "fetch",
    "write",
    "send", "written", "retire",
)  # fmt: skip
WARP_GROUPS = Path(str(templates.__file__)).parent / "device" / "warp_groups.py"


class WaitsForever(AssertionError):
    """No group can go on, or not all that was asked for has come."""


class Anything:
    """A tile, a layout, a pointer: what is done with one gives another one. It decides nothing, so `bool` of it is an error."""

    def _other(self, *_: Any, **__: Any) -> Anything:
        return self

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        raise TypeError("where a kernel goes depends on a tile")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a tile has no parts here")

    __call__ = __getitem__ = _other
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = _other
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __lshift__ = __rshift__ = __neg__ = __invert__ = _other
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _other
    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class Barrier:
    """Of a phase: the arrivals that are missing, and bytes. Its first phase is number 0."""

    count: int
    missing: int
    bytes: int = 0
    phase: int = 0

    def arrive(self, expected: int = 0) -> None:
        if self.missing == 0:
            raise WaitsForever("a barrier is arrived at again while bytes of its phase are on their way")
        self.missing -= 1
        self.get(-expected)

    def get(self, count: int) -> None:
        self.bytes -= count
        if self.missing == self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def lets_pass(self, parity: int) -> bool:
        """Whether the last phase that is over has this parity."""
        return self.phase & 1 != parity


class Memory(Anything):
    """Shared memory: its lengths, and the barriers in it."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.shape = tuple(lengths)
        self.parts: dict[int, Memory] = {}
        self.barrier: Barrier | None = None

    def index(self, at: int) -> Memory:
        assert 0 <= at < self.shape[0], f"place {at} of {self.shape[0]}"
        return self.parts.setdefault(at, Memory(self.shape[1:]))


@dataclass(slots=True)
class Descriptor:
    """A TMA descriptor whose blocks have so many bytes."""

    bytes: int
    dtype: Anything = field(default_factory=Anything)
    layout: Anything = field(default_factory=Anything)


class Stopped(BaseException):
    """Ends the thread of a group that waits for ever."""


class Group:
    """A warp group, and what it waits for."""

    def __init__(self, program: Program, run: Callable[[], None]) -> None:
        self.program, self.run = program, run
        self.ready: Callable[[], bool] = lambda: True
        self.waits, self.ended, self.stopped = "", False, False
        self.error: BaseException | None = None
        self.goes, self.pauses = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.goes.acquire()
        try:
            if not self.stopped:
                self.run()
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self.pauses.release()

    def pause(self, waits: str = "", ready: Callable[[], bool] = lambda: True) -> None:
        """Of the group's own thread: lets others run until `ready`."""
        self.waits, self.ready = waits, ready
        self.pauses.release()
        self.goes.acquire()
        if self.stopped:
            raise Stopped

    def go_on(self) -> None:
        self.goes.release()
        self.pauses.acquire()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.stopped = True
        while not self.ended:
            self.goes.release()
            self.pauses.acquire()


class Program:
    """One program of a kernel, whose groups and copies take turns as `draw` says."""

    def __init__(self, kernel: TritonKernel, number: int, draw: random.Random, sums: TileSums | None = None) -> None:
        self.number, self.draw, self.sums = number, draw, sums
        self.groups: list[Group] = []
        self.copies: list[tuple[Barrier, int]] = []  # under way
        self.every: list[Barrier] = []
        self.retired = 0
        names = self._names()
        names["ws"] = self._warp_groups(names)
        exec(compile(_without_imports(kernel.source), kernel.name, "exec"), names)
        main = names[kernel.name]
        given = self._given(kernel)
        assert len(inspect.signature(main).parameters) == len(given)
        main(*given)
        assert self.retired == len(self.every), "the memory of barriers that are not taken back may be given to tiles"

    def _given(self, kernel: TritonKernel) -> list[Any]:
        """What stands for the kernel's parameters."""
        return [0 if self.sums and kind == "*i32" else _parameter(kind) for kind in kernel.signature]

    def _names(self) -> dict[str, Any]:
        def of_numbers(choose: Callable[[int, int], int]) -> Callable[[Any, Any], Any]:
            return lambda a, b: choose(a, b) if isinstance(a, int) and isinstance(b, int) else Anything()

        class Language(Anything):
            static_range = staticmethod(range)
            cdiv = staticmethod(lambda a, b: -(-a // b))
            minimum = staticmethod(of_numbers(min))
            maximum = staticmethod(of_numbers(max))
            program_id = staticmethod(lambda _: self.number)
            where = staticmethod(lambda a, b, c: (b if a else c) if isinstance(a, int) else Anything())
            allocate_shared_memory = staticmethod(lambda _, lengths, __: Memory(lengths))
            warp_specialize = staticmethod(lambda parts, *_: self._together(parts))

        class Library(Anything):
            branch_constant = staticmethod(lambda number, _: number)
            grouped_tile = staticmethod(lambda tile, tiles_m, *_: (tile % tiles_m, tile // tiles_m))

        jit = SimpleNamespace(jit=lambda fn: fn, constexpr_function=lambda fn: fn)
        return {"tl": Language(), "gl": Language(), "lib": Library(), "gluon": jit, "triton": jit}

    def _warp_groups(self, names: dict[str, Any]) -> Any:
        stubs = {
            **names,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=Anything(), init=self._init, wait=self._wait, arrive=self._arrive, expect=self._expect,
                invalidate=self._retire,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._copy, async_copy_shared_to_global=self._leave, store_wait=self._leave
            ),
            "builtin": lambda fn: fn, "ir": Anything(),
            "fence_async_shared": Anything(), "mma_v2": Anything(), "warpgroup_mma": Anything(),
            "warpgroup_mma_init": Anything(), "warpgroup_mma_wait": Anything(),
        }  # fmt: skip
        exec(compile(_without_imports(WARP_GROUPS.read_text()), "warp_groups.py", "exec"), stubs)

        class WarpSpecialized(Anything):
            ticket = staticmethod(lambda _: self.number if self.sums is None else self.sums.ticket())
            await_number, publish = staticmethod(self._await_number), staticmethod(self._publish)
            put_tile, reduce_tile = staticmethod(self._put), staticmethod(self._add)
            summed = staticmethod(self._summed)

            def __getattr__(self, name: str) -> Any:
                return stubs[name] if name in PROTOCOL else Anything()

        return WarpSpecialized()

    def _await_number(self, place: int, number: int) -> None:
        sums = self.sums
        if sums is not None:
            self._own().pause(f"number {number} at {place}", lambda: sums.await_number(place, number))

    def _publish(self, place: int, number: int) -> None:
        if self.sums is not None:
            self.sums.publish(place, number)

    def _put(self, _: Descriptor, origin: Sequence[int], __: Memory) -> None:
        if self.sums is not None:
            self.sums.put(origin[0], self.number)

    def _add(self, _: Descriptor, origin: Sequence[int], __: Memory) -> None:
        if self.sums is not None:
            self.sums.add(origin[0], self.number)

    def _summed(self, _: Anything, row: int, __: int, ___: int, there: bool, ____: Any) -> Anything:
        if self.sums is not None:
            self.sums.reads(row, self.number, there)
        return Anything()

    def _init(self, memory: Memory, count: int) -> None:
        memory.barrier = Barrier(count, count)
        self.every.append(memory.barrier)

    def _retire(self, memory: Memory) -> None:
        _barrier(memory)
        assert all(group.ended for group in self.groups), "a barrier is taken back while groups may use it"
        memory.barrier = None
        self.retired += 1

    def _own(self) -> Group:
        return next(group for group in self.groups if group.thread is threading.current_thread())

    def _wait(self, memory: Memory, parity: int) -> None:
        barrier = _barrier(memory)
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_name} in {caller.f_back.f_code.co_name if caller.f_back else '?'}, phase {barrier.phase}"
        self._own().pause(where, lambda: barrier.lets_pass(parity))

    def _arrive(self, memory: Memory) -> None:
        self._own().pause()
        _barrier(memory).arrive()

    def _expect(self, memory: Memory, count: int) -> None:
        self._own().pause()
        _barrier(memory).arrive(count)

    def _copy(self, descriptor: Descriptor, origin: Sequence[int], memory: Memory, into: Memory) -> None:
        assert isinstance(into, Memory)
        assert all(isinstance(at, int) for at in origin)
        self.copies.append((_barrier(memory), descriptor.bytes))
        self._own().pause()

    def _leave(self, *_: Any) -> None:
        self._own().pause()

    def _together(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self.groups = [Group(self, lambda fn=fn, args=args: fn(*args)) for fn, args in parts]
        try:
            while not all(group.ended for group in self.groups):
                able = [group for group in self.groups if not group.ended and group.ready()]
                if not able and not self.copies:
                    raise WaitsForever("; ".join(group.waits for group in self.groups if not group.ended))
                chosen = self.draw.randrange(len(able) + len(self.copies))
                if chosen < len(able):
                    able[chosen].go_on()
                else:
                    barrier, count = self.copies.pop(chosen - len(able))
                    barrier.get(count)
        finally:
            for group in self.groups:
                group.stop()
        if self.copies or any(barrier.bytes for barrier in self.every):
            raise WaitsForever("bytes are on their way when the kernel ends, or never come")


def _barrier(memory: Memory) -> Barrier:
    assert memory.barrier is not None, "no barrier is there"
    return memory.barrier


def _parameter(kind: str) -> Any:
    found = BITS.fullmatch(kind)
    if found is None:
        return Anything()
    return Descriptor(math.prod(map(int, found[2].split(","))) * int(found[1]) // 8)


def _without_imports(text: str) -> str:
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):  # types are of names that nobody made
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree)


def run(kernel: TritonKernel, programs: Sequence[int], orders: int = 6) -> None:
    """Runs programs of a kernel, each in as many orders; sizes have to be known when it is made.

    Raises WaitsForever when a group does not come to its end."""
    for number in programs:
        for seed in range(orders):
            Program(kernel, number, random.Random(seed))


def run_in_order(kernel: TritonKernel, programs: int) -> TileSums:
    """Runs all programs of a kernel, each behind the one before, and says who has added to which tile in memory."""
    sums = TileSums()
    for number in range(programs):
        Program(kernel, number, random.Random(number), sums)
    return sums
