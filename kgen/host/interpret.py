"""GPU kernels on the CPU, for tests on machines without a GPU: each kernel's text runs in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import threading
from collections.abc import Iterator
from typing import Any

import torch

from kgen.build.gpu_kernel import TritonKernel
from kgen.errors import TritonNotFound

__all__ = ["Interpreted"]

_PATCHES = "kgen.templates.triton.interpret"
_DTYPES = {
    "*i1": torch.bool, "*i8": torch.int8, "*u8": torch.uint8, "*i16": torch.int16, "*u16": torch.uint16, "*i32": torch.int32,
    "*u32": torch.uint32, "*i64": torch.int64, "*u64": torch.uint64, "*fp16": torch.float16, "*bf16": torch.bfloat16,
    "*fp32": torch.float32, "*fp64": torch.float64, "*fp8e4nv": torch.float8_e4m3fn, "*fp8e5": torch.float8_e5m2,
}  # fmt: skip
_one_at_a_time = threading.RLock()  # the interpreter patches triton.language while it runs


class Interpreted:
    """A kernel as a function of its tensors and sizes, then of the three sizes of the grid."""

    def __init__(self, kernel: TritonKernel) -> None:
        self.kernel = kernel
        self.function: Any = None

    def __call__(self, *args: Any) -> tuple[()]:
        *given, x, y, z = args
        if min(x, y, z) > 0:
            with _interpreting():
                self.function = self.function or _define(self.kernel)
                arguments = [_flat(a, t) if t in _DTYPES else a for a, t in zip(given, self.kernel.signature, strict=True)]
                self.function[(x, y, z)](*arguments)
        return ()


def _flat(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What lies in memory from the tensor's first element on: a kernel's index arithmetic has the strides."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    flat = tensor.detach().as_strided((count,), (1,))
    return flat if flat.dtype is _DTYPES[kind] else flat.view(_DTYPES[kind])


def _define(kernel: TritonKernel) -> Any:
    name = f"<kgen kernel {kernel.name} {id(kernel)}>"
    linecache.cache[name] = (
        len(kernel.source),
        None,
        kernel.source.splitlines(keepends=True),
        name,
    )  # the interpreter reads it
    module: dict[str, Any] = {"__name__": f"kgen_interpreted_{kernel.name}"}
    exec(compile(kernel.source, name, "exec"), module)
    return module[kernel.name]


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
