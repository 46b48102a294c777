"""Conditions that all lanes of a loop share: the loop is there for each of their values, so that it loads what one value needs.

    before   for i: y[i] = first ? a[i] if first : b[i] if not first         masked loads of both, and all arithmetic
    after    if first: for i: y[i] = a[i];  else for i: y[i] = b[i]

The parts of a concatenation along an outer loop and the frame of a padded image are such conditions. The text stays one: a
function of the conditions, which are known to the compiler where it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kgen.ir import values as vs
from kgen.ir.plan import Nest
from kgen.ir.values import Value
from kgen.templates.cpp.codegen.emit import Emitter

# Conditions at most, of which each doubles the code, and the most statements that a loop may have for each number of them.
MOST, STATEMENTS = 2, 64


@dataclass(frozen=True, slots=True)
class Branches:
    """The names of conditions, and the statements that name what follows from them."""

    conditions: tuple[str, ...]
    derived: tuple[str, ...]


def branches(nest: Nest, emitter: Emitter, body: Sequence[str]) -> Branches:
    """The conditions that decide which loads of a vector loop over points are made, if its statements are few."""
    if not nest.vertical or nest.kernel.inner or nest.tile is not None or len(body) > STATEMENTS:
        return Branches((), ())
    found = list(dict.fromkeys(c for mask in _masks(nest, emitter) for c in _conditions(mask)))
    names = {
        v: name for v, name in emitter.task.names.items() if isinstance(v, Value) and v.dtype is torch.bool and v.op != "const"
    }
    chosen = [c for c in found if c in names][:MOST]
    following = {names[v] for v in names if v not in chosen and v.op in ("and", "or", "not") and _follows(v, chosen)}
    derived = tuple(line for line in emitter.task.lines if line.removeprefix("const auto ").partition(" ")[0] in following)
    return Branches(tuple(names[c] for c in chosen), derived)


def _masks(nest: Nest, emitter: Emitter) -> Iterator[Value]:
    """Masks of loads that differ between lanes, which are themselves the same for all lanes."""
    for load in vs.loads([root for s in nest.kernel.statements for root in s.roots]):
        if load.args and emitter.varies(load) and not emitter.varies(load.args[0]):
            yield load.args[0]


def _conditions(mask: Value) -> Iterator[Value]:
    """What a mask consists of, without "and", "or" and "not"."""
    for value in vs.topological([mask]):
        if value.dtype is torch.bool and value.op not in ("and", "or", "not", "const"):
            yield value


def _follows(value: Value, chosen: Sequence[Value]) -> bool:
    return any(v in chosen for v in vs.topological([value]))
