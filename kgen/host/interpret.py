"""GPU kernels on the CPU, for tests on machines without a GPU: each kernel's text runs in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import threading
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from kgen.build.triton_worker import place_of_line
from kgen.errors import TensorMapRefused, TritonNotFound
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.tensor_map import is_pointer, map_block, map_rank, map_steps

__all__ = ["Interpreted"]

# How the names begin that the texts of kernels have as files.
_TEXT = "<kgen kernel"
_PATCHES = "kgen.templates.triton.codegen.interpret"
_DTYPES = {
    "*i1": torch.bool, "*i8": torch.int8, "*u8": torch.uint8, "*i16": torch.int16, "*u16": torch.uint16, "*i32": torch.int32,
    "*u32": torch.uint32, "*i64": torch.int64, "*u64": torch.uint64, "*fp16": torch.float16, "*bf16": torch.bfloat16,
    "*fp32": torch.float32, "*fp64": torch.float64, "*fp8e4nv": torch.float8_e4m3fn, "*fp8e5": torch.float8_e5m2,
}  # fmt: skip
_one_at_a_time = threading.RLock()  # the interpreter patches triton.language while it runs


class Interpreted:
    """A kernel as a function of the tensors, then of the integers that a launch gives it (`kgen.host.program.Launch`), then of
    the three sizes of the grid. `maps` names the buffers of its TMA descriptors."""

    def __init__(self, kernel: TritonKernel, maps: tuple[str, ...] = ()) -> None:
        self.kernel = kernel
        self.maps = maps
        self.function: Any = None

    def __call__(self, *args: Any) -> tuple[()]:
        *given, x, y, z = args
        if min(x, y, z) > 0:
            with _interpreting():
                self.function = self.function or _define(self.kernel)
                arguments = list(self._arguments(given))
                with _unchecked_descriptors():
                    self._run((x, y, z), arguments)
        return ()

    def _run(self, grid: tuple[int, int, int], arguments: list[Any]) -> None:
        """What is raised has a note that names the line of an author's template."""
        try:
            self.function[grid](*arguments)
        except Exception as error:
            place = next(filter(None, (place_of_line(self.kernel.source, line) for line in _lines(error))), "")
            if place:
                error.add_note(place.rstrip())
            raise

    def _arguments(self, given: Sequence[Any]) -> Iterator[Any]:
        tensors = iter([a for a in given if isinstance(a, torch.Tensor)])
        numbers = iter([a for a in given if not isinstance(a, torch.Tensor)])
        names = iter(self.maps)
        for kind in self.kernel.signature:
            if is_pointer(kind):
                yield _flat(next(tensors), kind)
            elif rank := map_rank(kind):
                yield self._descriptor(kind, next(tensors), list(islice(numbers, 1 + 2 * rank)), next(names))
            else:
                yield next(numbers)

    def _descriptor(self, kind: str, tensor: torch.Tensor, numbers: list[int], name: str) -> Any:
        dtype, block = map_block(kind)
        if any(step > 1 for step in map_steps(kind)):
            raise TensorMapRefused(kernel=self.kernel.name, buffer=name, problem="Triton's interpreter knows no steps")
        offset, sizes, strides = numbers[0], numbers[1 : 1 + len(block)], numbers[1 + len(block) :]
        memory = _flat(tensor, f"*{dtype}")[offset:]
        try:
            found = _descriptor_class()(memory, [max(1, size) for size in sizes], strides, list(block))
        except AssertionError as problem:
            raise TensorMapRefused(kernel=self.kernel.name, buffer=name, problem=str(problem)) from None
        found.shape = sizes  # Triton refuses a size of 0; a kernel leaves such a tensor alone
        return found


def _descriptor_class() -> Any:
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor


@contextlib.contextmanager
def _unchecked_descriptors() -> Iterator[None]:
    """The interpreter copies descriptors, which would check them again, sizes of 0 included."""
    kind = _descriptor_class()
    check = kind.__post_init__
    kind.__post_init__ = lambda self: None
    try:
        yield
    finally:
        kind.__post_init__ = check


def _flat(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What is in memory from the tensor's first element on: a kernel's index arithmetic has the strides."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    flat = tensor.detach().as_strided((count,), (1,))
    return flat if flat.dtype is _DTYPES[kind] else flat.view(_DTYPES[kind])


def _define(kernel: TritonKernel) -> Any:
    name = f"{_TEXT} {kernel.name} {id(kernel)}>"
    linecache.cache[name] = (
        len(kernel.source),
        None,
        kernel.source.splitlines(keepends=True),
        name,
    )  # the interpreter reads it
    module: dict[str, Any] = {"__name__": f"kgen_interpreted_{kernel.name}"}
    try:
        code = compile(kernel.source, name, "exec")
    except SyntaxError as error:
        place = place_of_line(kernel.source, error.lineno or 0)
        if place:
            error.add_note(place.rstrip())
        raise
    exec(code, module)
    return module[kernel.name]


def _lines(error: BaseException | None) -> Iterator[int]:
    """Lines of kernels' texts that an error, and what it comes of, was raised in, the innermost first."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename.startswith(_TEXT) and frame.lineno is not None:
                yield frame.lineno
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Functions decorated inside are interpreted ones."""
    if importlib.util.find_spec("triton") is None:
        raise TritonNotFound()
    with _one_at_a_time:
        knobs = importlib.import_module("triton.knobs")
        before = knobs.runtime.interpret
        knobs.runtime.interpret = True
        try:
            with _patched():
                yield
        finally:
            knobs.runtime.interpret = before


def _patched() -> contextlib.AbstractContextManager[Any]:
    """What was decorated before, Triton's own functions and the library of kernels, as interpreted functions too."""
    if importlib.util.find_spec(_PATCHES) is None:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = importlib.import_module(_PATCHES).patched()
    return found
