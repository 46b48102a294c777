"""The one place where the op families' rules come together.

A family module exports ``RULES``: operator name -> rule. A name is ``"aten.add"`` (every overload) or ``"aten.add.Scalar"``
(that overload, which wins). A rule is called as ``rule(builder, *args, **kwargs)`` with `Tensor` for tensors, `Expr` for
symbolic integers, and Python objects for the rest; it returns a `Tensor`, a tuple of them, an `Expr`, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from kgen import errors

Rule = Callable[..., Any]


def merge(families: tuple[ModuleType, ...]) -> dict[str, Rule]:
    """All rules in one table; two families claiming one operator is an error."""
    table: dict[str, Rule] = {}
    owner: dict[str, str] = {}
    for family in families:
        rules: Mapping[str, Rule] = family.RULES
        for name, rule in rules.items():
            if name in table:
                raise errors.DuplicateRule(operator=name, first=owner[name], second=family.__name__)
            table[name], owner[name] = rule, family.__name__
    return table


def find(table: Mapping[str, Rule], target: Any) -> Rule | None:
    """The rule for an OpOverload, the overload's own before the packet's."""
    name = operator_name(target)
    return table.get(name) or table.get(name.rpartition(".")[0])


def operator_name(target: Any) -> str:
    """``aten.add.Tensor`` for an OpOverload; the qualified Python name for anything else."""
    namespace = getattr(target, "namespace", None)
    if namespace and hasattr(target, "_overloadname"):
        packet = target._schema.name.split("::")[1]
        return f"{namespace}.{packet}.{target._overloadname}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', str(target))}"
