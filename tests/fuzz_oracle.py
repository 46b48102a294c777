"""Compares one random program under kgen with eager: exceptions, dtypes, strides, aliases, values, written inputs, gradients.

Eager runs set the tolerance: one in float64, and some in the program's own types that perturb the last bits of every inexact
intermediate result. kgen's error may be a small multiple of what these runs differ by. Integers, booleans, infinities and NaNs
that differ among them depend on the last bits, and are not compared.

Torch leaves open which of several equal elements a sort or a top-k takes first. A gradient goes to that one. A difference is
right where it is between what eager makes in other orders of equal elements.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from fuzz_program import Program, differentiated
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kgen
from kgen.capture.decompositions import TABLE
from kgen.errors import NotConvertible
from kgen.imperative.convert import converted

# Operators whose results have the bits of their operands: a perturbation would make equal elements different.
EXACT = frozenset((
    "clone", "cat", "stack", "index", "gather", "index_select", "where", "flip", "roll", "constant_pad_nd", "max", "min",
    "amax", "amin", "relu", "neg", "abs", "copy_", "zero_", "fill_", "masked_fill", "masked_fill_", "embedding", "sort",
    "_to_copy", "slice_scatter", "select_scatter", "diagonal_scatter", "maximum", "minimum", "floor", "ceil", "round",
    "trunc", "sign", "new_zeros", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "arange", "take",
    "scatter", "index_copy", "index_fill", "cummax", "cummin", "topk", "kthvalue", "repeat", "tril", "triu",
))  # fmt: skip
# Operators that are sums of terms of order 1, whose last bits are those of the terms where they cancel: near a root.
SUMS = frozenset(("digamma", "lgamma", "special_digamma", "special_gammaln"))
RUNS = 2
MORE_RUNS = 12
# Operators that may take equal elements in any order.
UNORDERED = frozenset(("sort", "topk", "kthvalue", "median", "nanmedian"))
# Runs of eager with other orders of equal elements, where a difference has been found.
ORDERS = 200


@dataclass(frozen=True)
class Finding:
    """`kind` is "ok", "torch" (torch's own tracing has the difference as well), "skipped", "refused" (kgen.control_flow says
    that it cannot convert this), or names the difference."""

    kind: str
    text: str = ""

    @property
    def bad(self) -> bool:
        return self.kind not in ("ok", "torch", "skipped", "refused")


@dataclass
class Outcome:
    error: BaseException | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for kind, group in (("result", self.results), ("input", self.inputs), ("gradient", self.gradients)):
            yield from ((f"{kind} {k}", t) for k, t in enumerate(group))


def check(program: Program, device: str = "cpu", backend: Any = "kgen") -> Finding:
    """What differs between the program under `backend` and in eager."""
    eager = _run(program, device)
    if type(eager.error).__name__ != (program.raises or "NoneType"):
        return Finding("skipped", f"eager: {eager.error}")
    found = _difference(program, device, backend, eager)
    if device_lost(found):
        return Finding("crash", found.text)
    if not found.bad or backend != "kgen":
        return found
    if found.kind == "values" and not repeats(eager, _run(program, device)):
        return Finding("torch", f"{found.text}\n(eager reads what nobody wrote: its own results are others each time)")
    if _same(found, _difference(program, device, "aot_eager", eager)):
        return Finding("torch", found.text)
    if _same(found, _difference(program, device, _decomposed(), eager)):
        # torch's decompositions do not keep every layout, nor do the fake tensors that Dynamo traces with
        kind = "torch" if found.kind == "strides" else found.kind
        return Finding(kind, f"{found.text}\n(the same with torch's decompositions in eager)")
    return found


def repeats(eager: Outcome, again: Outcome) -> bool:
    """Whether two runs of eager have the same results, up to the order of additions."""
    return all(_is_near(a, b) for (_, a), (_, b) in zip(eager.named(), again.named(), strict=True))


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    inexact = a.dtype.is_floating_point or a.dtype.is_complex
    return torch.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True) if inexact else torch.equal(a, b)


def device_lost(found: Finding) -> bool:
    """Whether a kernel has failed on a GPU, after which this process can do nothing more there."""
    return "CUDA error" in found.text


def _same(found: Finding, other: Finding) -> bool:
    """Whether another backend has the difference as well: of an error the same message, else of the same result."""
    if found.kind != other.kind:
        return False
    if found.kind == "error":
        return _message(found.text) == _message(other.text)
    return found.text.partition(" (")[0] == other.text.partition(" (")[0]


def _message(text: str) -> str:
    """The message of an error, without the addresses of objects."""
    last = text.split("raised:\n")[-1].split("\n")[0].rpartition(": ")[2]
    return re.sub(r"\b(0x)?[0-9a-f]{12,}\b", "", last)


def _decomposed() -> Any:
    def keep(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return gm.forward

    return aot_autograd(fw_compiler=keep, decompositions=TABLE, keep_inference_input_mutations=True)


def _difference(program: Program, device: str, backend: Any, eager: Outcome) -> Finding:
    torch._dynamo.reset()
    dynamic = program.dynamic or (None if program.marked else False)
    compiled = partial(torch.compile, backend=backend, dynamic=dynamic, fullgraph=True)
    if program.converted:
        compiled = _with_control_flow(backend, dynamic)
    other = program.longer()
    try:
        first, second = _two_runs(program, other, device, compiled)
    except NotConvertible as error:
        return Finding("refused", str(error))
    finally:
        torch._dynamo.reset()
    for one, outcome, call in ((program, first, "first"), (other, second, "second")):
        found = _compare(one, device, eager if one is program else _run(one, device), outcome)
        if found.bad:
            return Finding(found.kind, f"{call} call: {found.text}")
    return Finding("ok")


def _with_control_flow(backend: Any, dynamic: bool | None) -> Callable[..., Any]:
    """What converts a function and compiles it: torch's other backends get the same operators."""
    if backend == "kgen":
        return partial(kgen.control_flow, dynamic=dynamic)
    return lambda f: torch.compile(converted(f), backend=backend, dynamic=dynamic, fullgraph=True)


def _two_runs(program: Program, other: Program, device: str, compiled: Callable[..., Any]) -> tuple[Outcome, Outcome]:
    """The first call's results are looked at after the second call, which must leave them alone. `other` has the same text."""
    space, second = program.load(device), other.load(device)
    f = compiled(space["f"])
    return _call(program, f, space, space["make"]()), _call(other, f, second, second["make"]())


def _run(program: Program, device: str) -> Outcome:
    space = program.load(device)
    return _call(program, space["f"], space, space["make"]())


def _call(program: Program, f: Callable[..., Any], space: dict[str, Any], bases: Sequence[torch.Tensor]) -> Outcome:
    try:
        if program.gradients:
            return Outcome(None, *differentiated(f, space["views"], bases))
        with torch.no_grad():
            inputs = space["views"](*bases)
            return Outcome(None, f(*inputs), inputs)
    except Exception as error:
        return Outcome(error)


# ---- comparing ------------------------------------------------------------------------------------------------------


def _compare(program: Program, device: str, eager: Outcome, got: Outcome) -> Finding:
    if eager.error is not None or got.error is not None:
        return _compare_errors(eager.error, got.error)
    for (name, a), (_, b) in zip(got.named(), eager.named(), strict=True):
        if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            return Finding("type", f"{name} is {_described(a)}, not {_described(b)}")
    found = _compare_values(program, device, eager, got)
    return found if found.bad else _compare_layouts(program, device, eager, got)


def _compare_errors(eager: BaseException | None, got: BaseException | None) -> Finding:
    if isinstance(got, NotConvertible):
        return Finding("refused", str(got))
    if got is None:
        return Finding("silent", f"eager raises {type(eager).__name__}: {str(eager)[:200]}")
    if eager is None or "BackendCompilerFailed" in type(got).__name__ or type(got).__module__.startswith("torch._dynamo"):
        return Finding("error", f"{type(got).__name__}: {str(got)[:1500]}")
    return Finding("ok")


def _described(t: torch.Tensor) -> str:
    return f"{t.dtype} {list(t.shape)} {'with' if t.requires_grad else 'without'} gradient"


def _compare_layouts(program: Program, device: str, eager: Outcome, got: Outcome) -> Finding:
    """Strides may also be those that fake tensors promise: a program is traced with them, and they are not always eager's."""
    traced: list[tuple[int, ...]] | None = None
    for k, ((name, _), a, b) in enumerate(zip(got.named(), _layouts(got), _layouts(eager), strict=False)):
        if a[:2] != b[:2]:
            return Finding("alias", f"{name} is in the storage of {a[0]} at {a[1]}, not of {b[0]} at {b[1]}")
        if a[2] != b[2]:
            traced = _traced_strides(program, device) if traced is None else traced
            if traced[k : k + 1] != [a[2]]:
                return Finding("strides", f"{name} has strides {a[2]}, not {b[2]}")
    return Finding("ok")


def _traced_strides(program: Program, device: str) -> list[tuple[int, ...]]:
    """The strides of results that tracing computes; none where it fails."""
    space = program.load(device)
    real = space["make"]()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, contextlib.suppress(Exception), torch.no_grad():
        bases = [mode.from_tensor(b) for b in real]
        return [_strides(t) for t in space["f"](*space["views"](*bases))]
    return []


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """As far as they matter."""
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()


def _layouts(outcome: Outcome) -> list[tuple[str, int, tuple[int, ...]]]:
    """For each result and input: whose storage it shares, where it begins there, and strides as far as they matter.

    In a storage that no input has, only distances between results count."""
    owners: dict[int, tuple[str, int]] = {}
    for k, t in enumerate(outcome.inputs):
        owners.setdefault(t.untyped_storage()._cdata, (f"input {k}", 0))
    found = []
    for name, t in ((n, t) for n, t in outcome.named() if not n.startswith("gradient")):
        owner, start = owners.setdefault(t.untyped_storage()._cdata, (name, t.storage_offset() * t.element_size()))
        found.append((owner, t.storage_offset() * t.element_size() - start, _strides(t)))
    return found


def _compare_values(program: Program, device: str, eager: Outcome, got: Outcome) -> Finding:
    if all(_identical(a, b) for (_, a), (_, b) in zip(got.named(), eager.named(), strict=True)):
        return Finding("ok")
    others = [*_widened(program, device), *(o for k in range(RUNS) for o in _perturbed(program, device, k, 1.0))]
    found = _first_wrong(eager, got, others)
    if found.bad:  # a jump that few perturbations meet?
        others += [o for k in range(MORE_RUNS) for o in _perturbed(program, device, RUNS + k, (1.0, 4.0)[k % 2])]
        others += _by_definition(program, device)
        found = _first_wrong(eager, got, others)
    if found.bad:
        again = ORDERS if reordered(program, device, 0) else 0
        found = _first_wrong(eager, got, others, [o for k in range(again) for o in reordered(program, device, k)])
    return found


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a, b))


def _first_wrong(eager: Outcome, got: Outcome, others: Sequence[Outcome], reordered: Sequence[Outcome] = ()) -> Finding:
    columns = zip(got.named(), eager.named(), *(o.named() for o in (*others, *reordered)), strict=True)
    for (name, a), (_, b), *rest in columns:
        tensors = [t.detach() for _, t in rest[: len(others)] if t.shape == b.shape]
        orders = [t.detach() for _, t in rest[len(others) :] if t.shape == b.shape]
        wrong = _wrong(a.detach(), b.detach(), tensors, orders)
        if bool(wrong.any()):
            return Finding("values", _worst(name, a.detach(), b.detach(), tensors, wrong))
    return Finding("ok")


def _wrong(
    got: torch.Tensor, eager: torch.Tensor, others: Sequence[torch.Tensor], orders: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Which elements differ by more than eager's own runs explain. `orders` are eager's results in other orders of equal
    elements."""
    between = torch.zeros_like(got, dtype=torch.bool)
    if orders and not got.dtype.is_complex and got.dtype is not torch.bool:
        runs = torch.stack([eager, *orders])
        between = (runs != eager).any(0) & (runs.amin(0) <= got) & (got <= runs.amax(0))
    return ~between & _differs(got, eager, others)


def _differs(got: torch.Tensor, eager: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    if not got.dtype.is_floating_point:
        stable = torch.ones_like(got, dtype=torch.bool)
        for other in others:
            stable &= other == eager
        return stable & (got != eager)
    a, b = got.double(), eager.double()
    same_class = torch.ones_like(a, dtype=torch.bool)
    spread = torch.zeros_like(a)
    for other in (o.double() for o in others):
        same_class &= _class(other) == _class(b)
        spread = torch.maximum(spread, torch.where(other.isfinite() & b.isfinite(), (other - b).abs(), 0))
    finite = a.isfinite() & b.isfinite()
    info = torch.finfo(got.dtype)
    most = spread.max() if spread.numel() else spread.sum()
    allowed = 4 * info.eps * b.abs() + 16 * spread + 4 * most + 4 * info.smallest_normal
    return torch.where(finite, (a - b).abs() > allowed, _class(a) != _class(b)) & same_class


def _class(x: torch.Tensor) -> torch.Tensor:
    return x.isnan() * 3 + x.isposinf() * 1 + x.isneginf() * 2


def _worst(name: str, got: torch.Tensor, eager: torch.Tensor, others: Sequence[torch.Tensor], wrong: torch.Tensor) -> str:
    difference = torch.where(wrong, (got.double() - eager.double()).abs().nan_to_num(torch.inf), -1)
    place = int(difference.flatten().argmax())
    at = [t.flatten()[place].item() for t in (got, eager, *others[:2])]
    return (
        f"{name} ({got.dtype}, {list(got.shape)}): {int(wrong.sum())} of {wrong.numel()} elements, the worst at {place}: "
        f"{at[0]}, eager {at[1]}, its other runs {at[2:]}"
    )


# ---- eager's other runs ---------------------------------------------------------------------------------------------


def _widened(program: Program, device: str) -> list[Outcome]:
    """Eager in float64; nothing where it does not run in it."""
    space = program.load(device, widened=True)
    bases = [b.double() if b.is_floating_point() else b for b in program.load(device)["make"]()]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [o for o in (_call(program, space["f"], space, bases),) if o.error is None]
    finally:
        torch.set_default_dtype(before)


def _by_definition(program: Program, device: str) -> list[Outcome]:
    """Eager with attention as torch documents it. Fast kernels make numbers of some NaNs."""
    with sdpa_kernel(SDPBackend.MATH):
        return [o for o in (_run(program, device),) if o.error is None]


def reordered(program: Program, device: str, seed: int) -> list[Outcome]:
    space, generator = program.load(device), torch.Generator(device).manual_seed(seed)
    with _PLAIN_BRANCHES, OtherOrder(generator) as mode:
        outcome = _call(program, space["f"], space, space["make"]())
    return [outcome] if mode.used and outcome.error is None else []


class OtherOrder(TorchDispatchMode):
    """Sorts and selects in another order, so that of equal elements another one is first."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.used = generator, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        given = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if name not in UNORDERED or len(func._schema.returns) != 2 or given.get("stable") or not args[0].dim():
            return func(*args, **kwargs)
        self.used = True
        dim = given.get("dim", -1)
        order = torch.rand(args[0].shape, generator=self.generator, device=args[0].device).argsort(dim)
        values, numbers = func(args[0].gather(dim, order), *args[1:], **kwargs)
        if numbers.dim() == order.dim():
            return values, order.gather(dim, numbers)
        return values, order.gather(dim, numbers.unsqueeze(dim)).squeeze(dim)


def _branch(condition: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (yes if condition else no)(*operands)


# Modes of dispatch see no operators inside of `torch.cond`.
_PLAIN_BRANCHES = mock.patch.object(torch, "cond", _branch)


def _perturbed(program: Program, device: str, seed: int, scale: float) -> list[Outcome]:
    space = program.load(device)
    generator = torch.Generator(device).manual_seed(seed)
    noise = partial(_nudge, generator=generator, scale=scale)
    bases = space["make"]()
    for base in bases:
        noise(base)
    with _PLAIN_BRANCHES, _Noise(noise):
        outcome = _call(program, space["f"], space, bases)
    return [outcome] if outcome.error is None else []


class _Noise(TorchDispatchMode):
    """Perturbs what operators compute."""

    def __init__(self, nudge: Callable[..., None]) -> None:
        super().__init__()
        self.nudge = nudge

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        own = all(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns)
        if own and func._schema.name.removeprefix("aten::") not in EXACT:
            for t in tree_leaves(made):
                if isinstance(t, torch.Tensor) and t.is_floating_point():
                    self.nudge(t, least=float(func._schema.name.removeprefix("aten::") in SUMS))
        return made


def _nudge(t: torch.Tensor, generator: torch.Generator, scale: float, least: float = 0.0) -> None:
    """Changes inexact elements by up to some units in the last place, of smaller ones than `least` in that of this. Numbers of
    few bits count as exact."""
    if not t.numel() or not t.is_floating_point():
        return
    wide = t.double()
    exact = wide.to(torch.bfloat16) == wide if t.element_size() >= 4 else ((wide * 4).frac() == 0) & (wide.abs() <= 32)
    factor = torch.rand(t.shape, generator=generator, device=t.device, dtype=torch.float64) * 2 - 1
    changed = wide + factor * scale * torch.finfo(t.dtype).eps * wide.abs().clamp(min=least)
    changed = torch.where(exact | ~wide.isfinite(), wide, changed)
    with contextlib.suppress(RuntimeError):  # elements that share memory
        t.copy_(changed)
