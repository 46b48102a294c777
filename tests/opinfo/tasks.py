"""One task of the operator suite: an operator of torch's own database, a dtype, and a kind of call, under kgen and in eager.

All samples of a task are one graph, which is traced and compiled once. Where that differs from eager, each sample is compiled
alone, so that a finding names one.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

# That import forbids this process to set switches such as cudnn.allow_tf32, which other tests do.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

KINDS = ("forward", "gradient", "inplace", "out")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64")
WIDER = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64) | {torch.complex64: torch.complex128}
# Of a gradient or result against float64: as many times eager's own error, and so many units in the last place.
FACTOR, UNITS = 3.0, 16.0
# Characters of two outcomes' texts that are equal where they are about the same thing.
SAME = 60
# Their results are whatever memory holds.
UNSET = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_", "resize_as_")


@dataclass(frozen=True)
class Task:
    op: str
    dtype: str
    kind: str

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.kind}"


@dataclass(frozen=True)
class Outcome:
    """`status`: "ok", "eager" (eager refuses the samples), "unseen" (Dynamo leaves the operator to eager), "torch" (the same
    comes out where AOTAutograd's graphs run in eager), "values", "type", "error", "crash" or "hang"."""

    status: str
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.status not in ("ok", "eager", "unseen", "torch")


@functools.cache
def operators() -> dict[str, OpInfo]:
    """The database by names. What seeds the generator inside of an operator would be a graph break: it is left out."""
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {op.full_name: op for op in invocations.op_db}


def tasks(device: str, dtypes: Sequence[str], kinds: Sequence[str]) -> list[Task]:
    """What the database says an operator has, the same dtype's one after the other."""
    found = []
    for dtype in dtypes:
        kind_of_dtype = getattr(torch, dtype)
        for name, op in operators().items():
            forward = kind_of_dtype in op.supported_dtypes(device)
            backward = op.supports_autograd and kind_of_dtype in op.supported_backward_dtypes(device)
            has = {
                "forward": forward,
                "gradient": backward,
                "inplace": forward and op.get_inplace() is not None,
                "out": forward and op.supports_out,
            }
            found += [Task(name, dtype, kind) for kind in kinds if has[kind]]
    return found


# ---- calls --------------------------------------------------------------------------------------------------------------

Call = Callable[..., Any]
Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Checker:
    """Checks tasks. `backend` gets graphs; with `samples`, as many are taken from the operator's list, spread over it."""

    device: str
    backend: Callable[..., Any]
    samples: int = 3

    def check(self, task: Task) -> Outcome:
        op = operators()[task.op]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            samples = [_parts(s) for s in self._samples(op, task) if _usable(s, task)]
            call = _call(op, task.kind)
            ready = [one for one in map(functools.partial(_prepared, call, task), samples) if one is not None]
            if not ready:
                return Outcome("eager", "no sample that eager takes")
            found = self._compare(call, task, ready)
            if not found.bad:
                return found
            alone = [self._alone(call, task, one) for one in ready]
            worst = [replace(f, detail=f"sample {k}: {f.detail}") for k, f in enumerate(alone) if f.bad]
            torchs = [f for f in alone if f.status == "torch"]
            return next(iter([*worst, *torchs]), found)

    def _alone(self, call: Call, task: Task, one: _Prepared) -> Outcome:
        """One sample. What tracing alone gets wrong is not this back end's."""
        found = self._compare(call, task, [one])
        if not found.bad:
            return found
        traced = replace(self, backend=aot_eager)._compare(call, task, [one])
        same = traced.status == found.status and traced.detail[:SAME] == found.detail[:SAME]
        return replace(found, status="torch") if same else found

    def _samples(self, op: OpInfo, task: Task) -> list[SampleInput]:
        dtype = getattr(torch, task.dtype)
        try:
            made = [s for s, _ in zip(op.sample_inputs(self.device, dtype, task.kind == "gradient"), range(300), strict=False)]
        except Exception:  # the database cannot make them on this machine
            return []
        if len(made) <= self.samples:
            return made
        return [made[k * (len(made) - 1) // max(1, self.samples - 1)] for k in range(self.samples)]

    def _compare(self, call: Call, task: Task, ready: Sequence[_Prepared]) -> Outcome:
        torch._dynamo.reset()
        counted = _Counted(self.backend)

        def whole(samples: list[Sample]) -> list[Any]:
            return [call(*s) for s in samples]

        try:
            inputs = [one.fresh() for one in ready]
            torch.manual_seed(7)
            results = torch.compile(whole, backend=counted, dynamic=False)(inputs)
            got = _gathered(task, inputs, results)
        except Exception as error:
            return Outcome("error", " ".join(f"{type(error).__name__}: {error}".split())[:600])
        finally:
            torch._dynamo.reset()
        for mine, one in zip(got, ready, strict=True):
            found = _difference(mine, one)
            if found.bad:
                return found
        return Outcome("ok" if counted.graphs else "unseen")


class _Counted:
    """A back end that counts its graphs."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend, self.graphs = backend, 0

    def __call__(self, gm: Any, inputs: Any, **options: Any) -> Any:
        self.graphs += 1
        return self.backend(gm, inputs, **options)


def _parts(sample: SampleInput) -> Sample:
    return sample.input, tuple(sample.args), dict(sample.kwargs)


def _usable(sample: SampleInput, task: Task) -> bool:
    return not (task.kind == "inplace" and getattr(sample, "broadcasts_input", False))


def _call(op: OpInfo, kind: str) -> Call:
    """What is compiled: of input, arguments and keyword arguments."""
    if kind == "inplace":
        inplace = op.get_inplace()

        def written(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = x.clone()
            return inplace(x, *args, **kwargs), x

        return written
    function = op.get_op()

    def called(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(x, *args, **kwargs)

    return called


# ---- eager, and comparing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    """A sample with what eager makes of it. `exact` gives results in wider types, if eager has them; `values` says whether
    they may be compared at all: those of random numbers may not."""

    sample: Sample
    eager: list[Any]
    exact: Callable[[], list[Any] | None]
    values: bool
    precise: bool

    def fresh(self) -> Sample:
        return _copied(self.sample)


def _copied(sample: Sample) -> Sample:
    return tree_map(lambda v: _copy(v) if isinstance(v, Tensor) else copy.copy(v) if isinstance(v, list) else v, sample)


def _copy(t: Tensor) -> Tensor:
    """The same values, strides and offset, in memory of its own."""
    if type(t) is not Tensor or t.layout != torch.strided or t.is_conj() or t.is_neg() or t.is_quantized:
        return t.detach().clone().requires_grad_(t.requires_grad)
    made = torch.empty(0, dtype=t.dtype, device=t.device)
    made.set_(t.detach().untyped_storage().clone(), t.storage_offset(), t.size(), t.stride())
    return made.requires_grad_(t.requires_grad)


def _prepared(call: Call, task: Task, sample: Sample) -> _Prepared | None:
    """None where eager raises, or nothing has a gradient."""
    if task.kind == "out":
        sample = _with_out(call, sample)
        if sample is None:
            return None
    try:
        eager, other = (_eagerly(call, task, sample, seed) for seed in (7, 8))
    except Exception:
        return None
    if task.kind == "gradient" and not eager:
        return None
    fixed = task.op.split(".")[-1] not in UNSET and all(map(_identical, eager, other))
    return _Prepared(sample, eager, functools.partial(_exact, call, task, sample), fixed, task.kind != "gradient")


def _with_out(call: Call, sample: Sample) -> Any:
    """The sample with tensors for its results, of the right sizes, with other values in them."""
    try:
        made = call(*_copied(sample))
    except Exception:
        return None
    leaves = tree_leaves(made)
    if not leaves or not all(type(t) is Tensor and t.layout == torch.strided for t in leaves):
        return None
    out = tree_map(lambda t: torch.full_like(t.detach(), 3), tuple(leaves) if isinstance(made, tuple | list) else made)
    return sample[0], sample[1], {**sample[2], "out": out}


def _eagerly(call: Call, task: Task, sample: Sample, seed: int) -> list[Any]:
    inputs = _copied(sample)
    torch.manual_seed(seed)
    return _gathered(task, [inputs], [call(*inputs)])[0]


def _gathered(task: Task, inputs: Sequence[Sample], results: Sequence[Any]) -> list[list[Any]]:
    """Of each sample, everything to compare: results, and gradients, else the inputs after the call."""
    if task.kind != "gradient":
        return [[*tree_leaves(r), *_tensors(i)] for i, r in zip(inputs, results, strict=True)]
    made = [t for t in _tensors(results) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    given = [[t for t in _tensors(i) if t.requires_grad] for i in inputs]
    if not all(given) or not made:
        return [[]] * len(inputs)
    gradients = iter(torch.autograd.grad(sum(map(_weighted, made)), [t for one in given for t in one], allow_unused=True))
    return [[*tree_leaves(r), *(next(gradients) for _ in one)] for r, one in zip(results, given, strict=True)]


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _weighted(t: Tensor) -> Tensor:
    """A sum with other weights for each element: a plain sum of a softmax has no gradient."""
    t = t.to_dense() if t.layout != torch.strided else t
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    weights = torch.linspace(0.5, 1.5, max(1, t.numel()), device=t.device, dtype=torch.float64)[: t.numel()]
    return (t.reshape(-1).double() * weights).sum()


def _identical(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return True
    a, b = a.detach(), b.detach()
    return a.shape == b.shape and (
        a.layout != torch.strided or torch.allclose(*map(_wide, (a, b)), rtol=0, atol=0, equal_nan=True)
    )


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _exact(call: Call, task: Task, sample: Sample) -> list[Any] | None:
    def wider(v: Any) -> Any:
        if isinstance(v, Tensor):
            return v.detach().to(WIDER.get(v.dtype, v.dtype)).requires_grad_(v.requires_grad)
        return WIDER.get(v, v) if isinstance(v, torch.dtype) else v

    try:
        return _eagerly(call, task, tree_map(wider, sample), 7)
    except Exception:  # it has no such dtype
        return None


def _difference(got: Sequence[Any], one: _Prepared) -> Outcome:
    if len(got) != len(one.eager):
        return Outcome("type", f"{len(got)} results, not {len(one.eager)}")
    for k, (a, b) in enumerate(zip(got, one.eager, strict=True)):
        if not isinstance(b, Tensor):
            if type(a) is not type(b) or (one.values and a != b and a == a):  # noqa: PLR0124 NaN
                return Outcome("type", f"result {k} is {a!r}, not {b!r}")
            continue
        if not isinstance(a, Tensor) or (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return Outcome("type", f"result {k} is {_described(a)}, not {_described(b)}")
        if one.values and b.layout == torch.strided:
            text = _wrong(a.detach(), b.detach(), one, k)
            if text:
                return Outcome("values", f"result {k}: {text}")
    return Outcome("ok")


def _described(t: Any) -> str:
    return f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__


def _wrong(got: Tensor, eager: Tensor, one: _Prepared, k: int) -> str:
    """What is not equal within the tolerances of torch.testing, nor as exact as eager; empty if all is."""
    try:
        torch.testing.assert_close(got, eager, equal_nan=True, check_stride=False)
        return ""
    except AssertionError as error:
        text = " ".join(str(error).split())[:200]
    if not (eager.is_floating_point() or eager.is_complex()):
        return text
    flat = one.exact()
    exact = flat[k].detach() if flat is not None and isinstance(flat[k], Tensor) else None
    if exact is None or exact.shape != got.shape:
        return text
    a, b, x = (torch.view_as_real(v.resolve_conj()).double() if v.is_complex() else v.double() for v in (got, eager, exact))
    finite = x.isfinite() & b.isfinite()  # where eager overflows, or is undecided, nothing is known
    ours, theirs = ((v - x).abs().where(finite, 0).max().item() for v in (a.nan_to_num(torch.inf), b))
    allowed = FACTOR * theirs + UNITS * torch.finfo(eager.dtype).eps * x.where(finite, 0).abs().max().item()
    return "" if ours <= allowed else f"{text} (error {ours:.3g}, eager's {theirs:.3g})"
