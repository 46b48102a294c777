"""Random attention on a GPU, with gradients, by random configurations of each template, against float64.

A seed draws the scores, the mask, what is computed before and behind, the lengths, the types, and which configurations kernels
get (`tests/attention_configurations.py`). A template that refuses an attention leaves it to the portable ones.

    python -m tests.fuzz_attention                                           400 of each template that computes results
    python -m tests.fuzz_attention --first 1000 --count 50 --minutes 4
    python -m tests.fuzz_attention --templates triton_attention --first 17 --count 1
    python -m tests.fuzz_attention --device cpu --count 5                    small ones, in Triton's interpreter

The exit status is 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `python -m tests.fuzz_attention`
import torch
from torch import Tensor

from bench import attention_backward, smoke
from bench.attention_smoke import picked_of
from bench.gpu_attention import TEMPLATES
from bench.smoke import Check, Task
from kgen.only import Pick, only
from tests.attention_configurations import TOLERANCE, Configuration, drawn, drawn_large
from tests.codegen import gradients
from tests.fuzz_contractions.__main__ import cores

PORTABLE = TEMPLATES[0]
# How much larger than eager's an error may be, where eager's is above what the type allows: gradients that cancel.
TIMES = 3.0
# Of a result next to nothing: so much of a number of order 1 is no error.
LEAST = 1e-2
# The interpreter takes seconds for each tile.
INTERPRETED = 4000


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", nargs="*", default=list(TEMPLATES), help="templates that compute results")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--count", type=int, default=400, help="seeds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of each template; none begins afterwards")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes")
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter")
    return parser.parse_args(arguments)


def tasks_of(template: str, seeds: range, device: str = "cuda") -> list[Task]:
    """A task for each seed. Its number says which configuration the template gets."""
    draw = drawn_large if device == "cuda" else drawn
    found = [one for one in map(draw, seeds) if device == "cuda" or _work(one) < INTERPRETED]
    return [Task(str(one), partial(checked, one, template, device), one.seed, optional=True) for one in found]


def _work(one: Configuration) -> int:
    return one.batch * one.heads[0] * math.prod(one.lengths)


def checked(configuration: Configuration, template: str, device: str = "cuda") -> Check:
    """Compares the result and all gradients; on a CPU Triton's interpreter runs the kernels."""
    args = [one.to(device) for one in configuration.arguments()]
    wide = [one.double() if one.is_floating_point() else one for one in args]
    want, eager = _trained(configuration.function, wide), _trained(configuration.function, args)
    options = {"cache": False, "gpu_interpreter": device == "cpu", "recompute_scores": "on"}

    def call(pick: Pick) -> str:
        beside = attention_backward.TEMPLATES
        beside = beside if template == PORTABLE else (PORTABLE, *beside, *attention_backward.WARP_SPECIALIZED)
        # a thread of autograd's own, which would compile the backward graph later, knows nothing of `only`
        at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with at_once, only(template, picked_of(template, pick, configuration.seed), also=beside):
            compiled = torch.compile(_copy(configuration), backend="kgen", fullgraph=True, dynamic=False, options=options)
            got = _trained(compiled, args)
        tolerance = TOLERANCE[configuration.dtype]
        wrong = [difference(n, *three, tolerance) for n, three in enumerate(zip(got, want, eager, strict=True))]
        return "; ".join(filter(None, wrong))

    return call


def _trained(function: Callable[..., Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        return gradients(function)(*args)


def _copy(configuration: Configuration) -> Callable[..., Tensor]:
    """Dynamo keeps what it has compiled of a function."""

    def attention(*args: Tensor) -> Tensor:
        return configuration.function(*args)

    return attention


def difference(number: int, got: Tensor, want: Tensor, eager: Tensor, tolerance: float) -> str:
    """What is wrong with a result. Errors are relative, by norms."""
    if got.dtype != eager.dtype or (number == 0 and strides(got) != strides(eager)):
        return f"result {number} is {got.dtype} of strides {got.stride()}, not {eager.dtype} of {eager.stride()}"
    if not torch.equal(got.isnan(), want.isnan()):
        wrongly, missing = (int((one.isnan() & ~other.isnan()).sum()) for one, other in ((got, want), (want, got)))
        return f"result {number}: {wrongly} of {want.numel()} numbers are NaN and should not, {missing} are not and should"
    of_eager, mine = (float((one.double() - want).nan_to_num().norm()) for one in (eager, got))
    size = max(float(want.nan_to_num().norm()), LEAST * math.sqrt(want.numel()))
    if mine <= max(tolerance * size, TIMES * of_eager):
        return ""
    return f"result {number}: relative error {mine / size:.1e}, eager's {of_eager / size:.1e}"


def strides(tensor: Tensor) -> list[int]:
    """Of the dimensions that have several elements."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu runs small ones in Triton's interpreter")
    seeds = range(options.first, options.first + options.count)
    of = partial(tasks_of, seeds=seeds, device=options.device)
    return smoke.check(options.templates, of, options.jobs, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
