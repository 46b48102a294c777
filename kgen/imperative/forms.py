"""What a variable is behind a block: a tensor of some sizes and type, a tuple of such, or a Python value that stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "UNDEFINED",
    "Form",
    "as_number",
    "Refusal",
    "form_of",
    "in_form",
    "is_carried",
    "joined",
    "leaves",
    "number_type",
    "rebuilt",
    "widened",
]


class _Undefined:
    """A variable that nothing has assigned yet."""


UNDEFINED = _Undefined()


class Form:
    """Of a tensor. A block that asks for the sizes of one would get the tensor itself as a parameter."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device


def form_of(value: Any) -> Any:
    """A value with forms for tensors."""
    if isinstance(value, torch.Tensor):
        return Form(tuple([size for size in value.shape]), value.dtype, value.device)  # noqa: C416  Dynamo passes sizes, not a torch.Size
    return tuple([form_of(one) for one in value]) if isinstance(value, tuple | list) else value


def leaves(value: Any) -> list[Any]:
    """What a tree of tuples and lists holds."""
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, tuple | list) else [value]


def rebuilt(like: Any, flat: list[Any]) -> Any:
    """A tree like another one of the next leaves, which it takes from the list."""
    return tuple([rebuilt(one, flat) for one in like]) if isinstance(like, tuple | list) else flat.pop(0)


def is_carried(form: Any) -> bool:
    """Whether an operator has to carry the variable. All else is Python's, and stays the same."""
    return any([isinstance(one, Form) for one in leaves(form)])


def number_type(*values: Any) -> torch.dtype:
    """The type of tensors that stand for Python numbers."""
    kinds = [type(one) for one in values]
    if float in kinds:
        return torch.float64
    return torch.int64 if int in kinds else torch.bool


def _number_form(*values: Any) -> Form:
    return Form((), number_type(*values), torch.device("cpu"))


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def joined(one: Any, other: Any, is_same: Any) -> Any:
    """The form of a variable that has one of two, or a text that says why there is none. `is_same` compares numbers."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list) and len(one) == len(other):
        parts = [joined(a, b, is_same) for a, b in zip(one, other, strict=True)]
        return next((part for part in parts if isinstance(part, Refusal)), tuple(parts))
    if isinstance(one, Form) and isinstance(other, Form):
        same = one.sizes == other.sizes and one.dtype == other.dtype
        return one if same else Refusal(f"it is {_named(one)} in one branch and {_named(other)} in the other")
    if _is_number(one) and _is_number(other):
        return one if type(one) is type(other) and is_same(one, other) else _number_form(one, other)
    if isinstance(one, Form) and _is_number(other):
        return one
    if isinstance(other, Form) and _is_number(one):
        return other
    if one is other or (type(one) is type(other) and one == other):
        return one
    return Refusal(f"it is {_named(one)} in one branch and {_named(other)} in the other")


class Refusal:
    """Why a variable has no form."""

    def __init__(self, why: str) -> None:
        self.why = why


def _named(value: Any) -> str:
    if isinstance(value, Form):
        return f"a tensor {list(value.sizes)} of {value.dtype}"
    return "not assigned" if value is UNDEFINED else f"a {type(value).__name__}"


def widened(before: Any, after: Any) -> Any:
    """The form of a variable in front of a loop that makes `after` of it, or a Refusal."""
    if isinstance(before, tuple | list) and isinstance(after, tuple | list) and len(before) == len(after):
        parts = [widened(a, b) for a, b in zip(before, after, strict=True)]
        return next((part for part in parts if isinstance(part, Refusal)), tuple(parts))
    if isinstance(before, Form):
        other = isinstance(after, Form) and (before.sizes != after.sizes or before.dtype != after.dtype)
        return Refusal(f"it is {_named(before)} in front of an iteration, and {_named(after)} behind it") if other else before
    if _is_number(before) and isinstance(after, Form):
        return after
    if _is_number(before) and _is_number(after):
        return _number_form(before, after)
    if before is after or (type(before) is type(after) and before == after):
        return before
    return Refusal(f"it is {_named(before)} in front of an iteration, and {_named(after)} behind it")


def in_form(value: Any, form: Any) -> Any:
    """A value in a form that fits it, in memory of its own."""
    if isinstance(form, tuple | list):
        return tuple([in_form(UNDEFINED if value is UNDEFINED else value[k], one) for k, one in enumerate(form)])
    if not isinstance(form, Form):
        return form
    if isinstance(value, torch.Tensor):
        return value.clone()
    if value is UNDEFINED:
        return torch.zeros(form.sizes, dtype=form.dtype, device=form.device)
    return torch.full(form.sizes, as_number(value), dtype=form.dtype, device=form.device)


def as_number(value: Any) -> Any:
    """A Python number; a bool that sizes decide as 0 or 1."""
    if not isinstance(value, bool) or value is True or value is False:
        return value
    return torch.sym_ite(value, 1, 0)
