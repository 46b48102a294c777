"""The one place where the op families' rules come together. The rule of an overload goes before that of its packet.

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
