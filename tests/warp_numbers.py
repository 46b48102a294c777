"""Runs kernels in Gluon on numbers without a GPU: what `warp_barriers.py` runs, with tiles of shared memory, TMA and matmuls.

TMA loads fill what is out of bounds with zeros, and arrive whenever they are drawn. A matmul reads its operands as late as it
may, when it is waited for, and a TMA store its tile. So memory that is given back too early has other numbers by then. Shared
memory is NaN at first. Layouts are left to the compiler. Of functions that epilogues call, a few are known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen import pipeline
from kgen.host.interpret import Interpreted
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.tensor_map import is_pointer, map_block, map_rank, map_steps
from kgen.scheduler import Options
from tests.warp_barriers import WARP_GROUPS, Anything, Barrier, Group, Memory, Program, _barrier, _without_imports

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def memory_of(tensor: Tensor) -> Tensor:
    """What is in memory from the tensor's first element on."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.detach().as_strided((count,), (1,))


@dataclass
class Pointer:
    """Elements of a buffer at some places."""

    memory: Tensor
    at: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + other)

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        """Raises IndexError for what is outside of the buffer and is not masked."""
        at = torch.as_tensor(self.at)
        mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask
        at, mask = torch.broadcast_tensors(at, mask)
        return torch.where(mask, self.memory[torch.where(mask, at, 0)], torch.as_tensor(other, dtype=self.memory.dtype))


@dataclass
class BoxedTensor:
    """A TMA descriptor: tiles of `block` elements, one of `steps` along each dimension, of a tensor in memory."""

    memory: Tensor
    offset: int
    sizes: Sequence[int]
    strides: Sequence[int]
    block: Sequence[int]
    steps: Sequence[int]
    layout: Anything = field(default_factory=Anything)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.block).numel() * self.memory.itemsize

    def addresses(self, origin: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Where the elements of a box are, and which of them are within bounds."""
        assert len(origin) == len(self.block)
        at, inside = torch.tensor(self.offset), torch.tensor(True)
        for k, (start, count) in enumerate(zip(origin, self.block, strict=True)):
            shape = [1] * len(self.block)
            shape[k] = count
            coordinate = (start + self.steps[k] * torch.arange(count)).reshape(shape)
            at = at + coordinate * self.strides[k]
            inside = inside & (coordinate >= 0) & (coordinate < self.sizes[k])
        return at, inside

    def load(self, origin: Sequence[int]) -> Tensor:
        at, inside = self.addresses(origin)
        return torch.where(inside, self.memory[torch.where(inside, at, 0)], torch.zeros((), dtype=self.dtype))

    def store(self, origin: Sequence[int], value: Tensor) -> None:
        at, inside = self.addresses(origin)
        assert value.shape == inside.shape
        assert value.dtype == self.dtype
        self.memory[at[inside]] = value[inside]


@dataclass
class Tile:
    """A tile in shared memory, or a part of one."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def index(self, at: int) -> Tile:
        assert 0 <= at < self.data.shape[0]
        return Tile(self.data[at])

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int) -> Tile:
        return Tile(self.data.narrow(dim, start, length))

    def load(self, _: Any = None) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.data.dtype
        self.data.copy_(value)


@dataclass
class Sum:
    """A sum, and the matmuls that will be added to it."""

    total: Tensor
    waiting: list[tuple[Tile, Tile]] = field(default_factory=list)

    def wait(self, pending: int) -> Sum:
        late = len(self.waiting) - pending
        for left, right in self.waiting[: max(0, late)]:
            self.total = self.total + left.data.double() @ right.data.double()
        return Sum(self.total, self.waiting[max(0, late) :])


@dataclass
class Arrival:
    """A TMA load that is on its way to memory, of which a barrier will know."""

    barrier: Barrier
    arrive: Callable[[], None]

    def get(self, count: int) -> None:
        self.arrive()
        self.barrier.get(count)


class Library:
    """Of the functions that generated kernels call, those that epilogues of convolutions need."""

    wait_for_previous = staticmethod(lambda: None)
    narrow = staticmethod(lambda x, kind: x.to(kind))
    round_to = staticmethod(lambda x, kind: x.to(kind).to(x.dtype))
    rounded_to_bfloat16 = staticmethod(lambda x: x.to(torch.bfloat16).to(x.dtype))
    fast_sigmoid = staticmethod(torch.sigmoid)
    maximum = staticmethod(lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)))
    column_subtiles = staticmethod(lambda x, parts: x.chunk(parts, 1))

    @staticmethod
    def grouped_tile(program: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
        width = group * tiles_n
        first = program // width * group
        rows = min(tiles_m - first, group)
        return first + program % width % rows, program % width // rows


def extreme(of: Callable[..., Any], of_tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    def found(a: Any, b: Any, **_: Any) -> Any:
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            return of(a, b)
        return of_tensors(torch.as_tensor(a), torch.as_tensor(b))

    return found


class Numbers(Program):
    """One program of a kernel on numbers."""

    def __init__(self, kernel: TritonKernel, number: int, draw: random.Random, given: Sequence[Any]) -> None:
        self.given = given
        self.leaving: list[tuple[Group, Callable[[], None]]] = []
        super().__init__(kernel, number, draw)
        assert not self.leaving, "a tile is in memory that ends with the kernel"

    def _given(self, kernel: TritonKernel) -> list[Any]:
        return list(self.given)

    def _names(self) -> dict[str, Any]:
        names = super()._names()
        language = SimpleNamespace(
            float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, int64=torch.int64, constexpr=None,
            static_range=range, cdiv=lambda a, b: -(-a // b), program_id=lambda _: self.number,
            where=lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
            minimum=extreme(min, torch.minimum), maximum=extreme(max, torch.maximum), PropagateNan=Anything(),
            full=lambda shape, value, kind: torch.full(tuple(shape), value, dtype=kind),
            load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
            arange=lambda begin, end, _: torch.arange(begin, end), convert_layout=lambda x, _: x, SliceLayout=Anything(),
            zeros=lambda shape, *_: torch.zeros(tuple(shape), dtype=torch.float64), NVMMADistributedLayout=Anything(),
            allocate_shared_memory=self._memory, warp_specialize=lambda parts, *_: self._together(parts),
        )  # fmt: skip
        return {**names, "tl": language, "gl": language, "lib": Library}

    def _memory(self, kind: torch.dtype, lengths: Sequence[int], _: Any) -> Memory | Tile:
        if kind is torch.int64:
            return Memory(lengths)
        return Tile(torch.full(tuple(lengths), float("nan"), dtype=kind))

    def _warp_groups(self, names: dict[str, Any]) -> Any:
        stubs = {
            **names,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=Anything(), init=self._init, wait=self._wait, arrive=self._arrive, expect=self._expect,
                invalidate=self._retire,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._load, async_copy_shared_to_global=self._store, store_wait=self._stored
            ),
            "builtin": lambda fn: fn,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": lambda left, right, acc, is_async: Sum(acc.total, [*acc.waiting, (left, right)]),
            "warpgroup_mma_init": lambda acc: acc if isinstance(acc, Sum) else Sum(acc),
            "warpgroup_mma_wait": _settled,
        }  # fmt: skip
        exec(compile(_without_imports(WARP_GROUPS.read_text()), "warp_groups.py", "exec"), stubs)
        return SimpleNamespace(**stubs)

    def _load(self, descriptor: BoxedTensor, origin: Sequence[int], memory: Memory, into: Tile) -> None:
        into = into.reshape(descriptor.block)
        self.copies.append((Arrival(_barrier(memory), lambda: into.store(descriptor.load(origin))), descriptor.bytes))  # type: ignore[arg-type]
        self._own().pause()

    def _store(self, descriptor: BoxedTensor, origin: Sequence[int], staging: Tile) -> None:
        self.leaving.append((self._own(), lambda: descriptor.store(origin, staging.data)))
        self._own().pause()

    def _stored(self, pending: int) -> None:
        """Runs the stores of the calling group but for the last `pending`."""
        mine = [one for one in self.leaving if one[0] is self._own()]
        for one in mine[: max(0, len(mine) - pending)]:
            one[1]()
            self.leaving.remove(one)
        self._own().pause()


def _settled(pending: int, deps: Sequence[Sum]) -> Any:
    """A sum of which `pending` matmuls are under way; the numbers when there are none."""
    [acc] = deps
    found = acc.wait(pending)
    return found if pending else found.total.float()


def run(kernel: TritonKernel, tensors: Sequence[Tensor], numbers: Sequence[int], programs: int, seed: int = 0) -> None:
    """Runs all programs of a kernel on what a launch gives it (`kgen.host.program.Launch`)."""
    left, counts = iter(tensors), iter(numbers)
    given: list[Any] = []
    for kind in kernel.signature:
        if is_pointer(kind):
            given.append(Pointer(memory_of(next(left))))
        elif rank := map_rank(kind):
            offset, *rest = islice(counts, 1 + 2 * rank)
            element, block = map_block(kind)
            memory = memory_of(next(left))
            assert memory.dtype == TYPES[element]
            given.append(BoxedTensor(memory, offset, rest[:rank], rest[rank:], block, map_steps(kind)))
        else:
            given.append(next(counts))
    for number in range(programs):
        Numbers(kernel, number, random.Random(seed + number), given)


@contextmanager
def on_numbers(options: Options, seed: int = 0) -> Iterator[list[TritonKernel]]:
    """While this is open ``kgen.compile(..., options={"gpu_interpreter": True})`` runs its kernels in Gluon here, under these
    options of the scheduler. Gives the kernels that ran."""
    others, found = Interpreted.__call__, list[TritonKernel]()

    def call(one: Interpreted, *args: Any) -> tuple[()]:
        if "@gluon.jit" not in one.kernel.source:
            return others(one, *args)
        *given, x, y, z = args
        tensors = [a for a in given if isinstance(a, Tensor)]
        run(one.kernel, tensors, [a for a in given if not isinstance(a, Tensor)], x * y * z, seed)
        found.append(one.kernel)
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "scheduler_options", lambda graph, config: options)
        patch.setattr(Interpreted, "__call__", call)
        torch._dynamo.reset()
        yield found
