"""Is each configuration of attention templates right on a GPU? On small and odd lengths, against float64, one line a failure.

A kernel that never ends, or that spoils the device, must not end the check: a process of its own makes the checks one after the
other, and another one goes on behind the check at which it stopped.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import attention
from bench.contenders import copy_of, failure
from bench.gpu_timing import relative_error
from bench.matmuls import Given
from kgen.only import only
from kgen.templates.contract import Config

# Seconds that a check may take, with a process' start and the compiler.
PATIENCE = 90.0
# Largest relative error, by norms, and largest of an element against the largest number.
TOLERANCE, ELEMENT = 0.01, 0.03


@dataclass(frozen=True)
class Case:
    """A function of q, k, v and more, and the lengths: batch, heads, heads of keys, rows, keys, elements of keys and of
    values. `apart`: heads lie side by side in memory, as a projection makes them."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = torch.bfloat16
    apart: bool = False
    bias: bool = False

    def make(self, device: str = "cuda") -> list[Tensor]:
        batch, heads, shared, rows, keys, size, values = self.sizes
        shapes = (batch, heads, rows, size), (batch, shared, keys, size), (batch, shared, keys, values)
        args = [self._tensor(shape, device, seed) for seed, shape in enumerate(shapes)]
        return [*args, self._tensor((heads, rows, keys), device, 3)] if self.bias else args

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


def zeros_for_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, early(q, k))


def with_log_sum_exp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = attention.causal_scores((q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * 0.3)
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)


CASES = (
    Case("plain", attention.plain, (2, 3, 3, 384, 512, 128, 128)),
    Case("causal odd", attention.causal, (2, 3, 3, 333, 333, 128, 128)),
    Case("plain odd", attention.plain, (1, 2, 2, 77, 201, 64, 64), torch.float16),
    Case("causal", attention.causal, (2, 2, 2, 1024, 1024, 64, 64), apart=True),
    Case("window", near, (1, 2, 2, 700, 700, 64, 64)),
    Case("grouped", shared_heads, (2, 4, 2, 520, 520, 128, 128), apart=True),
    Case("bias", capped_and_biased, (2, 2, 2, 200, 330, 80, 48), bias=True),
    Case("gated", gated, (2, 2, 2, 300, 300, 64, 64)),
    Case("nothing seen", nothing_seen, (1, 2, 2, 700, 300, 64, 64)),
    Case("nothing seen, zeros", zeros_for_nothing, (1, 2, 2, 700, 300, 128, 128)),
    Case("log-sum-exp", with_log_sum_exp, (2, 2, 2, 300, 300, 64, 64)),
    Case("long head", attention.causal, (1, 2, 2, 260, 260, 256, 256)),
    Case("short head", attention.causal, (1, 2, 2, 260, 260, 32, 16), torch.float16),
)


@dataclass
class Progress:
    """The check that was begun last, how many were, and how many failed."""

    case: int = 0
    number: int = -1
    config: str = ""
    checks: int = 0
    wrong: int = 0


def results(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def check(templates: Sequence[str]) -> int:
    """Prints what is wrong, and how many checks there were of each template; the exit status."""
    wrong = 0
    for template in templates:
        progress = Progress()
        while not _went_on(template, progress):
            print(f"{template}: {CASES[progress.case].name}: {progress.config} never ends, or ends its process", flush=True)
            progress.wrong += 1
        print(f"{template}: {progress.checks} checks, {progress.wrong} failures", flush=True)
        wrong += progress.wrong
    return int(wrong > 0)


def _went_on(template: str, progress: Progress) -> bool:
    """Makes the checks behind those that were begun, in a process of its own; False where one stopped it."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, template, progress.case, progress.number + 1), daemon=True)
    process.start()
    theirs.close()
    try:
        while ours.poll(PATIENCE):
            match ours.recv():
                case ("begin", case, number, config):
                    progress.checks += not config
                    progress.case, progress.number, progress.config = case, number, config
                case ("wrong", message):
                    print(f"{template}: {CASES[progress.case].name}: {progress.config}: {message}", flush=True)
                    progress.wrong += 1
                case _:
                    return True
    except EOFError:
        pass
    finally:
        process.kill()
    return False


def _work(link: Connection, template: str, case: int, number: int) -> None:
    """All checks from a case's configuration on."""
    with torch.no_grad():
        for at in range(case, len(CASES)):
            args = CASES[at].make()
            want = results(CASES[at].function(*(one.double() for one in args)))
            configs: list[Config] = [Config(())]
            number = number if at == case else 0
            while number < len(configs):
                link.send(("begin", at, number, ""))
                configs = _check_one(link, template, (at, number), args, want) or configs
                number += 1
    link.send(("end",))


def _check_one(
    link: Connection, template: str, place: tuple[int, int], args: list[Tensor], want: tuple[Tensor, ...]
) -> list[Config]:
    """Checks the configuration of a number, and gives all of them."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        seen[:] = found
        one = found[min(place[1], len(found) - 1)]
        link.send(("begin", *place, " ".join(f"{name}={value}" for name, value in one.values)))
        return one

    torch._dynamo.reset()
    try:
        with only(template, pick):
            function = torch.compile(
                copy_of(CASES[place[0]].function), backend="kgen", fullgraph=True, options={"cache": False}
            )
            got = function(*args)
        wrong = (_difference(one.double(), other) for one, other in zip(results(got), want, strict=True))
        message = "; ".join(filter(None, wrong)) if seen else "it is not used"
    except Exception as cause:
        message = failure(cause)
    if message:
        link.send(("wrong", message))
    return seen


def _difference(got: Tensor, want: Tensor) -> str:
    """What is wrong with a result."""
    if not torch.equal(got.isnan(), want.isnan()):
        return f"{int((got.isnan() != want.isnan()).sum())} of {want.numel()} numbers are NaN, or are not"
    got, want = got.nan_to_num(), want.nan_to_num()
    error, largest = relative_error(got, want), float((got - want).abs().max() / want.abs().max())
    if error <= TOLERANCE and largest <= ELEMENT:
        return ""
    bad = ((got - want).abs() > ELEMENT * want.abs().max()).nonzero()
    first = f", the first at {tuple(bad[0].tolist())}" if len(bad) else ""
    return f"relative error {error:.1e}, of an element {largest:.1e}; {len(bad)} of {want.numel()} are far off{first}"
