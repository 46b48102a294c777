"""Triton kernels that the user wrote: calls of the kernel itself, on the memory that the graph gives its arguments.

AOTAutograd makes such a kernel functional: the result is a dictionary of the arguments that it writes, by name. A kernel gets
the strides of its arguments as numbers, so each argument has exactly the strides that the traced graph says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import get_kernel, triton_kernel_wrapper_mutation
from torch.fx import Node
from torch.utils._pytree import tree_flatten

from kgen import errors
from kgen.capture.tree_call import TreeCall
from kgen.lowering.builder import Builder, is_storable
from kgen.lowering.layout import fix_strides, store_with
from kgen.lowering.mutation import at_newest, base_in_place, plain_load
from kgen.lowering.tensor import Tensor


def functional(b: Builder, *, kwargs: Mapping[str, Any], tensors_to_clone: Sequence[str], **settings: Any) -> dict[str, Tensor]:
    """The kernel, which writes to copies of `tensors_to_clone`, or to themselves where nobody reads their old contents."""
    nodes: Mapping[str, Any] = b.current.kwargs["kwargs"]
    written = {nodes[name]: to_write(b, nodes[name], kwargs[name]) for name in dict.fromkeys(tensors_to_clone)}
    given = {
        name: b.extern_tree(written[nodes[name]] if nodes[name] in written else _to_read(b, nodes[name], value))
        for name, value in kwargs.items()
    }
    leaves, spec = tree_flatten(((), {**settings, "kwargs": given}))
    targets = dict.fromkeys(_name_of(tensor) for tensor in written.values())
    pairs = [(target, b.new_version(target).name) for target in targets]
    call = TreeCall(triton_kernel_wrapper_mutation, spec, f"triton.{_kernel_name(settings['kernel_idx'])}")
    b.extern(call, leaves, {}, [], "a Triton kernel of the user", pairs, effect=True)
    return {name: at_newest(b, written[nodes[name]]) for name in tensors_to_clone}


def _kernel_name(number: int) -> str:
    """The name of the Python function, under whatever tunes it."""
    kernel: Any = get_kernel(number)
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", "kernel"))


def _name_of(tensor: Tensor) -> str:
    name = plain_load(tensor)
    assert name is not None
    return name


def to_write(b: Builder, source: Node, given: Tensor) -> Tensor:
    wanted = b.symbols.sizes(source.meta["val"].stride())
    free = base_in_place(b, given, source)
    view = None if free is None else b.as_view(free)
    if free is not None and view is not None and fix_strides(b, view, wanted):
        b.freeze(view.buffer)
        return free
    return _stored(b, source, given, b.copy)


def _to_read(b: Builder, source: Any, given: Any) -> Any:
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(given, Tensor) or given.weak or not isinstance(value, torch.Tensor):
        return given
    view = b.as_view(given)
    if view is not None and fix_strides(b, view, b.symbols.sizes(value.stride())):
        b.freeze(view.buffer)
        return given
    return _stored(b, source, given, b.stored_operand)


def _stored(b: Builder, source: Node, given: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """The argument in a buffer with the traced strides. Raises LoweringFailed where several elements share a place."""
    wanted = b.symbols.sizes(source.meta["val"].stride())
    if not is_storable(given.sizes, wanted, b.symbols):
        cause = f"no buffer of sizes {list(given.sizes)} has the strides {list(wanted)} of argument {source.name}"
        raise errors.LoweringFailed(operator="a Triton kernel", cause=cause, line=b.origin.line)
    return store_with(given, wanted, copy, b)


def mutation(b: Builder, **_settings: Any) -> None:
    """A kernel that writes to its arguments does not say to which: AOTAutograd makes it functional. Raises LoweringFailed."""
    raise errors.LoweringFailed(operator="a Triton kernel", cause="the graph is not functional", line=b.origin.line)


RULES: dict[str, Callable[..., Any]] = {
    "torch.ops.higher_order.triton_kernel_wrapper_functional": functional,
    "torch.ops.higher_order.triton_kernel_wrapper_mutation": mutation,
}
