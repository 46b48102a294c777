"""Kernels on the CPU, in Triton's interpreter, although Triton was imported to compile.

``with patched():`` kernels that are defined (by exec or import) and launched inside run interpreted, on CPU tensors. Triton
decides at decoration whether a function is compiled, so what was decorated before is replaced for the duration:

- functions of `triton.language` that are themselves written in Triton, by the Python functions under their decorators;
- the module `library`, by a second one that consists of such plain functions. It is what a kernel imports as `lib` inside; its
  calls of libdevice go to torch functions;
- methods of the interpreter that round wrongly, drop NaNs differently than the GPU, or fold tiles one element at a time;
- what it works out again for each operation (`interpret_types`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.experimental.gluon  # the first launch imports it, and it needs the language's functions as they were decorated
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import ConstexprFunction, JITFunction

from kgen.templates.triton import device as package
from kgen.templates.triton.codegen import interpret_types
from kgen.templates.triton.device import library

# functions of libdevice that torch knows by another name
_TORCH_NAMES = {
    "rint": "round", "j0": "bessel_j0", "j1": "bessel_j1", "y0": "bessel_y0", "y1": "bessel_y1", "cyl_bessel_i0": "i0",
    "cyl_bessel_i1": "i1", "normcdfinv": "ndtri",
}  # fmt: skip

_NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


@contextmanager
def patched() -> Iterator[None]:
    """For the duration, kernels are interpreted. Not for use in several threads at once."""
    with ExitStack() as stack:
        for owner, name, value in _replacements():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.callback(sys.modules.__setitem__, library.__name__, library)
        sys.modules[library.__name__] = _plain_library()
        # the interpreter does this for the modules that a kernel names; plain functions name others
        names = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
        stack.callback(interpreter._patch_lang(names).restore)
        stack.enter_context(np.errstate(all="ignore"))
        yield


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    yield triton.knobs.runtime, "interpret", True
    yield package, "library", _plain_library()
    for module in (tl, tl.standard, tl.random):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                yield module, name, value.fn
    builder = interpreter.InterpreterBuilder
    yield builder, "cast_impl", functools.partialmethod(_cast, builder.cast_impl)
    yield builder, "create_fp_to_fp", functools.partialmethod(_cast, builder.cast_impl)
    yield builder, "create_splat", _splat
    yield builder, "create_fma", _fma
    yield builder, "create_dot", _dot
    yield builder, "create_atomic_rmw", functools.partialmethod(_atomic, builder.create_atomic_rmw)
    yield builder, "get_all_ones_value", _all_ones
    yield builder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax)
    yield builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin)
    yield from interpret_types.replacements()
    yield interpreter.ReduceOps, "generic_reduce", _reduce
    yield interpreter.ScanOps, "generic_scan", _scan


@functools.cache
def _plain_library() -> ModuleType:
    """The library as Python functions, in one namespace: what the interpreter hands them are tensors that compute at once."""
    plain = ModuleType(library.__name__)
    names = vars(plain)
    names.update(tl=tl, libdevice=_Libdevice())
    for name, value in vars(library).items():
        if isinstance(value, triton.KernelInterface | ConstexprFunction):
            names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
    names.update(  # what is inline assembly otherwise
        branch_constant=lambda value, program: value,
        wait_for_previous=lambda: None,
        finished=lambda acc: acc,
        approximate_exp2=lambda x: tl.exp2(1.0 * x),  # which is patched by then
        approximate_reciprocal=lambda x: 1.0 / x,
        approximate_rsqrt=lambda x: 1.0 / tl.sqrt_rn(x),
        quotients=lambda a, b: tl.div_rn(a, b),  # noqa: PLW0108  patched by then, too
        inverses=lambda x: 1.0 / x,
        roots=lambda x: tl.sqrt_rn(x),  # noqa: PLW0108
        trap_unless=_trap_unless,
        float_of_byte=lambda x, to: x.to(tl.float32).to(to),
        multiply_halves=lambda a, b: (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype),
        to_halves=lambda x, to: x.to(to),
        bits_of_bytes=lambda x, shift, mask: ((x >> shift) & mask).to(tl.uint8),
        small_number=lambda x, to, less: (x.to(tl.float32) - less).to(to),
        rounded_to_bfloat16=lambda x: x.to(tl.bfloat16).to(tl.float32),
        rounded_to_tf32=lambda x: x,  # its matmuls are exact
    )
    return plain


def _trap_unless(inside: Any) -> None:
    if not np.all(inside.handle.data):
        raise IndexError("index out of range in a kernel")


def _half_turns(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x.double() * math.pi).to(x.dtype)


class _Libdevice:
    """libdevice's functions, computed by torch; subnormal float32 numbers count as zero, as Triton has it on the GPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        known = _TORCH_NAMES.get(name, name)
        function: Any = _NOT_IN_TORCH.get(name) or getattr(torch, known, None) or getattr(torch.special, known)

        def call(*args: Any) -> Any:
            result = _flush(function(*(_flush(torch.from_numpy(np.array(a.handle.data))) for a in args))).numpy()
            kind = args[0].dtype
            is_block = any(a.type.is_block() for a in args)
            shaped = tl.block_type(kind, list(result.shape)) if is_block else kind
            return tl.tensor(interpreter.TensorHandle(result, kind), shaped)

        return call


def _flush(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, x * 0, x) if x.dtype is torch.float32 else x


def _fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's own gives NaN where the quotient overflows."""
    return torch.from_numpy(np.fmod(a.numpy(), b.numpy()))


_NOT_IN_TORCH = {"fmod": _fmod, "cospi": _half_turns(torch.cos), "sinpi": _half_turns(torch.sin)}


def _as_torch(handle: Any) -> torch.Tensor:
    data = torch.from_numpy(np.array(handle.data))
    narrow = _NARROW.get(handle.dtype.scalar)
    return data if narrow is None else data.view(narrow)


def _cast(self: Any, original: Callable[..., Any], source: Any, target: Any, *_rounding: Any) -> Any:
    """Conversions from and to the floats that numpy does not have; the interpreter cuts digits off."""
    narrow = _NARROW.get(target.scalar)
    if narrow is None:
        if source.dtype.scalar not in _NARROW:
            return original(self, source, target)
        source = interpreter.TensorHandle(_as_torch(source).to(torch.float32).numpy(), tl.float32)
        return original(self, source, target)
    bits = torch.uint8 if narrow.itemsize == 1 else torch.uint16
    return interpreter.TensorHandle(_as_torch(source).to(narrow).view(bits).numpy(), target.scalar)


def _all_ones(_self: Any, kind: Any) -> Any:
    return interpreter.TensorHandle(np.invert(np.zeros(1, interpreter._get_np_dtype(kind))), kind.scalar)


def _splat(_self: Any, kind: Any, source: Any) -> Any:
    """Of a scalar that came from a comparison the handle has the type of what was compared."""
    found = np.full(kind.shape, np.ravel(source.data)[0], dtype=interpreter._get_np_dtype(kind.scalar))
    return interpreter.TensorHandle(found, kind.scalar)


def _fma(_self: Any, x: Any, y: Any, z: Any) -> Any:
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)


def _dot(_self: Any, left: Any, right: Any, acc: Any, *_precision: Any) -> Any:
    """Of bfloat16 the interpreter would multiply the bits."""
    wide = torch.float32 if acc.data.dtype.kind == "f" else torch.int32
    if acc.data.dtype == np.float64:
        wide = torch.float64
    total = torch.matmul(_as_torch(left).to(wide), _as_torch(right).to(wide)).numpy()
    return interpreter.TensorHandle((total + acc.data).astype(acc.data.dtype), acc.dtype.scalar)


def _atomic(self: Any, original: Callable[..., Any], mode: Any, pointers: Any, value: Any, mask: Any, *order: Any) -> Any:
    """Triton's interpreter has no atomic addition of bfloat16, the only mode of it that the GPU has, and reads a mask as flat
    memory: of one that is broadcast it took what stands behind it."""
    if value.dtype.scalar != tl.bfloat16:
        mask = interpreter.TensorHandle(np.ascontiguousarray(mask.data), mask.dtype)
        return original(self, mode, pointers, value, mask, *order)
    before = np.zeros_like(value.data)
    for place in map(tuple, np.argwhere(mask.data)):
        pointer = interpreter.TensorHandle(pointers.data[place].reshape(1), pointers.dtype)
        found = self.create_load(pointer, None, None, False)
        before[place] = found.data[0]
        added = interpreter.TensorHandle(value.data[place].reshape(1), tl.bfloat16)
        total = (_as_torch(found) + _as_torch(added)).view(torch.uint16).numpy()
        self.create_store(pointer, interpreter.TensorHandle(total, tl.bfloat16), None, None)
    return interpreter.TensorHandle(before, tl.bfloat16)


def _combine(self: Any, states: list[list[Any]], kinds: list[Any]) -> list[Any]:
    found = self.combine_fn(*(self.to_tensor(data, kind) for state in states for data, kind in zip(state, kinds, strict=True)))
    return [part.handle.data for part in (found if isinstance(found, tuple) else (found,))]


def _reduce(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Folds halves of the tile, as the GPU does; the interpreter would call `combine_fn` for each element."""
    rank = inputs[0].handle.data.ndim
    inputs, axis = self.unravel(inputs, self.axis)
    kinds = [x.dtype for x in inputs]
    state = [x.handle.data for x in inputs]
    while state[0].shape[axis] > 1:
        halves = [np.split(data, 2, axis) for data in state]
        state = _combine(self, [[low for low, _ in halves], [high for _, high in halves]], kinds)
    if self.keep_dims:
        state = [data.reshape((1,) * rank) if self.axis is None else data for data in state]
    else:
        state = [data.squeeze(axis) for data in state]
    return [self.to_tensor(data, kind) for data, kind in zip(state, kinds, strict=True)]


def _scan(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """All prefixes, by combining with what is 1, 2, 4... places before."""
    kinds = [x.dtype for x in inputs]
    state = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    distance = 1
    while distance < len(state[0]):
        joined = _combine(self, [[np.roll(data, distance, 0) for data in state], state], kinds)
        state = [np.concatenate([data[:distance], new[distance:]]) for data, new in zip(state, joined, strict=True)]
        distance *= 2
    return [self.to_tensor(np.moveaxis(data, 0, self.axis), kind) for data, kind in zip(state, kinds, strict=True)]
