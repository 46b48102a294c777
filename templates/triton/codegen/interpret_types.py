"""What Triton's interpreter works out again for each operation of each program, memoised: shapes, types, and checks whose
results it drops."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_block_type, _numpy_type = tl.block_type.__init__, interpreter._get_np_dtype


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """What to replace, its name there, and by what."""
    builder = interpreter.interpreter_builder
    # Each sum and each multiplication of integers is made a second time in 64 bits, for an assertion that is off without
    # `debug`: 40% of all time.
    yield builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug)
    yield interpreter, "_get_np_dtype", _type_in_numpy
    yield tl.block_type, "__init__", _new_block_type
    yield tl.tensor, "__init__", _new_tensor


def _type_in_numpy(kind: Any) -> Any:
    scalar = kind.scalar
    return _numpy_type(scalar) if isinstance(scalar, tl.pointer_type) else _named_type(scalar.name)


@functools.cache
def _named_type(name: str) -> Any:
    return _numpy_type(tl.dtype(name))


def _new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    known = _shape(tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape]))
    self.element_ty, self.shape, self.numel = element_ty, known.shape, known.numel
    self.name = f"<{known.shape_text}, {element_ty}>"


@functools.cache
def _shape(sizes: tuple[int, ...]) -> Any:
    """A type of this shape, which raises where there is none; with the text of its shape."""
    found = tl.block_type.__new__(tl.block_type)
    _block_type(found, tl.int1, list(sizes))
    found.shape_text = str(found.shape)
    return found


def _new_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  the name that callers give
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constants(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
