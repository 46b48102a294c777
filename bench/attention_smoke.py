"""Is each configuration of attention templates right on a GPU? On small and odd lengths, against float64 (`bench/smoke.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import attention, attention_backward, smoke
from bench.attention_backward import Scores
from bench.contenders import copy_of
from bench.gpu_timing import relative_error
from bench.matmuls import Given
from bench.smoke import Check, Task
from kgen.only import Pick, only
from kgen.templates import registry
from kgen.templates.contract import Config


@dataclass(frozen=True)
class Bounds:
    """The largest relative error, by norms, and the largest of an element against the largest number."""

    norm: float
    element: float


# Where a result is compared with eager's own. Else against float64, with so many times the errors that eager has at the same
# types, and what rounding of float32 numbers adds: how far sums that cancel lie off depends on what is summed.
OF_EAGER = Bounds(0.01, 0.03)
TIMES, ROUNDING = Bounds(2.0, 3.0), 1e-5


@dataclass(frozen=True)
class Case:
    """A function of q, k, v and more, and the lengths: batch, heads, heads of keys, rows, keys, elements of keys and of
    values. `apart`: heads lie side by side in memory, as a projection makes them. `own`: the result is compared with eager in
    its own type, and not in float64: back ends of the library disagree on what it means."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = torch.bfloat16
    apart: bool = False
    bias: bool = False
    own: bool = False
    gradients: Scores | None = None

    def of(self, template: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """What the template computes of the case."""
        return self.function if self.gradients is None else attention_backward.written_out(self.gradients, template)

    def make(self, device: str = "cuda") -> list[Tensor]:
        batch, heads, shared, rows, keys, size, values = self.sizes
        shapes = (batch, heads, rows, size), (batch, shared, keys, size), (batch, shared, keys, values)
        args = [self._tensor(shape, device, seed) for seed, shape in enumerate(shapes)]
        args += [self._tensor((heads, rows, keys), device, 3)] if self.bias else []
        return args if self.gradients is None else attention_backward.saved(self.gradients, *args)

    def _tensor(self, shape: tuple[int, ...], device: str, seed: int) -> Tensor:
        made = Given(shape, self.dtype).make(device, seed)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if self.apart and len(shape) == 4 else made


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)


def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = positions(q, k)
    keep = (columns <= rows) & (rows - columns < 100)
    return attention.scaled(q, k).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def early(q: Tensor, k: Tensor) -> Tensor:
    """Rows from 200 on see nothing."""
    rows, columns = positions(q, k)
    return (columns < 200) & (columns >= rows)


def nothing_seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.scaled(q, k).masked_fill(~early(q, k), -torch.inf).softmax(-1) @ v


def capped_and_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (5 * torch.tanh(attention.scaled(q, k) / 5) + bias).softmax(-1) @ v


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = q.shape[1] // k.shape[1]
    return attention.causal(q, k.repeat_interleave(count, 1), v.repeat_interleave(count, 1))


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With an epilogue that reads a tile, and a result whose heads lie side by side."""
    return (attention.causal(q, k, v) * torch.sigmoid(q)).transpose(1, 2).contiguous()


def call_with_nothing_seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, early(q, k))


def with_log_sum_exp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = attention.causal_scores((q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * 0.3)
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)


def masked_by_a_number(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Scores that a mask in memory keeps out are finite, and there is none of them in the weights."""
    return (q @ k.mT).masked_fill(bias < 0, -1e4).softmax(-1) @ v


def causal_by_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = attention.positions(s := attention.scaled(q, k))
    return torch.where(columns > rows, torch.finfo(s.dtype).min, s).softmax(-1) @ v


CASES = (
    Case("plain", attention.plain, (2, 3, 3, 384, 512, 128, 128)),
    Case("causal odd", attention.causal, (2, 3, 3, 333, 333, 128, 128)),
    Case("plain odd", attention.plain, (1, 2, 2, 77, 201, 64, 64), torch.float16),
    Case("causal", attention.causal, (2, 2, 2, 1024, 1024, 64, 64), apart=True),
    Case("window", near, (1, 2, 2, 700, 700, 64, 64)),
    Case("grouped", shared_heads, (2, 4, 2, 520, 520, 128, 128), apart=True),
    Case("bias", capped_and_biased, (2, 2, 2, 200, 330, 80, 48), bias=True),
    Case("masked by a number", masked_by_a_number, (2, 2, 2, 384, 512, 128, 128), bias=True),
    Case("causal by a number", causal_by_a_number, (2, 2, 2, 512, 512, 64, 64)),
    Case("gated", gated, (2, 2, 2, 300, 300, 64, 64)),
    Case("nothing seen", nothing_seen, (1, 2, 2, 700, 300, 64, 64)),
    Case("nothing seen, by the library", call_with_nothing_seen, (1, 2, 2, 700, 300, 128, 128), own=True),
    Case("log-sum-exp", with_log_sum_exp, (2, 2, 2, 300, 300, 64, 64)),
    Case("long head", attention.causal, (1, 2, 2, 260, 260, 256, 256)),
    Case("short head", attention.causal, (1, 2, 2, 260, 260, 32, 16), torch.float16),
)

# What is checked of templates of gradients. Batches are several: gradients of what they share are sums over them.
BACKWARD = tuple(
    Case(name, attention.plain, sizes, gradients=scores, **how)
    for name, scores, sizes, how in (
        ("plain", attention_backward.PLAIN, (2, 3, 3, 384, 512, 128, 128), {}),
        ("causal odd", attention_backward.CAUSAL, (2, 3, 3, 333, 333, 128, 128), {}),
        ("plain odd", attention_backward.PLAIN, (2, 2, 2, 77, 201, 64, 64), {"dtype": torch.float16}),
        ("causal", attention_backward.CAUSAL, (2, 2, 2, 1024, 1024, 64, 64), {"apart": True}),
        ("window", attention_backward.NEAR, (2, 2, 2, 700, 700, 64, 64), {}),
        ("capped and biased", attention_backward.CAPPED, (2, 2, 2, 200, 330, 80, 48), {"bias": True}),
        ("long head", attention_backward.CAUSAL, (2, 2, 2, 260, 260, 256, 256), {}),
        ("short head", attention_backward.CAUSAL, (2, 2, 2, 260, 260, 32, 16), {"dtype": torch.float16}),
        ("float32", attention_backward.CAUSAL, (2, 2, 2, 150, 150, 64, 64), {"dtype": torch.float32}),
    )
)


def cases_of(template: str) -> tuple[Case, ...]:
    return BACKWARD if "backward" in template else CASES


def results(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def check(templates: Sequence[str]) -> int:
    """Prints what is wrong, and how many checks there were of each template; the exit status."""
    return smoke.check(templates, tasks_of)


def tasks_of(template: str) -> list[Task]:
    optional = template in (*attention_backward.WARP_SPECIALIZED, *attention_backward.ALL_GRADIENTS)
    return [Task(case.name, partial(checked, case, template), optional=optional) for case in cases_of(template)]


def checked(case: Case, template: str, device: str = "cuda") -> Check:
    """Compares what a template makes of a case; on a CPU Triton's interpreter runs it."""
    args, function = case.make(device), case.of(template)
    eager = [one.double() for one in results(function(*args))]
    want = eager if case.own else [one.double() for one in results(function(*(arg.double() for arg in args)))]
    bounds = [OF_EAGER if case.own else bounds_of(*pair) for pair in zip(eager, want, strict=True)]
    options = {"cache": False, "gpu_interpreter": device == "cpu"}

    def call(pick: Pick) -> str:
        with only(template, picked_of(template, pick), also=attention_backward.beside(template) if case.gradients else ()):
            got = torch.compile(copy_of(function), backend="kgen", fullgraph=True, options=options)(*args)
        wrong = [
            difference(one.double(), *other) for one, other in zip(results(got), zip(want, bounds, strict=True), strict=True)
        ]
        return "; ".join(filter(None, wrong))

    return call


def is_of(template: str, config: Config) -> bool:
    """Whether the configuration has a template's knobs, and those alone."""
    return {name for name, _ in config.values} == set(registry.find(template).knobs)


def picked_of(template: str, pick: Pick, other: int = 0) -> Pick:
    """`pick` for the template; others beside it have the configuration of this number."""
    return lambda found: pick(found) if is_of(template, found[0]) else found[other % len(found)]


def bounds_of(eager: Tensor, want: Tensor) -> Bounds:
    """What a result may be off, where eager makes this of the same types."""
    found = errors_of(eager.nan_to_num(), want.nan_to_num())
    return Bounds(TIMES.norm * found.norm + ROUNDING, TIMES.element * found.element + ROUNDING)


def errors_of(got: Tensor, want: Tensor) -> Bounds:
    return Bounds(relative_error(got, want), float((got - want).abs().max() / want.abs().max()))


def difference(got: Tensor, want: Tensor, bounds: Bounds) -> str:
    """What is wrong with a result."""
    if not torch.equal(got.isnan(), want.isnan()):
        return f"{int((got.isnan() != want.isnan()).sum())} of {want.numel()} numbers are NaN, or are not"
    got, want = got.nan_to_num(), want.nan_to_num()
    errors = errors_of(got, want)
    if errors.norm <= bounds.norm and errors.element <= bounds.element:
        return ""
    bad = ((got - want).abs() > bounds.element * want.abs().max()).nonzero()
    first = f", the first at {tuple(bad[0].tolist())}" if len(bad) else ""
    return (
        f"relative error {errors.norm:.1e} of at most {bounds.norm:.1e}, of an element {errors.element:.1e} of at most "
        f"{bounds.element:.1e}; {len(bad)} of {want.numel()} are far off{first}"
    )
