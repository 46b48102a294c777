"""Plans of attention and its gradients, for a GPU or for a CPU, made where nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from kgen.capture import torch_adapter
from kgen.capture.decompositions import TABLE
from kgen.capture.higher_order import expand

from kgen.capture.rng import replace_random  # isort: skip  it defines an operator that the other one names
from kgen.capture.masked_weights import simplify_masked_weights
from kgen.capture.recompute_scores import recompute_scores
from kgen.capture.row_shifts import drop_row_shifts
from kgen.capture.sink_column import take_sinks_apart
from kgen.capture.weighted_sums import split_weighted_sums
from kgen.ir.plan import Schedule
from kgen.only import Only
from tests.codegen import options_for, plan_of

GRADIENTS = ("", "_scores", "_table", "_values")
GPU = Only("triton_attention", lambda configs: configs[0], also=tuple(f"triton_attention_backward{one}" for one in GRADIENTS))
CPU = Only("cpp_attention", lambda configs: configs[0], also=tuple(f"cpp_attention_backward{one}" for one in GRADIENTS))


def before_split(whole: GraphModule) -> GraphModule:
    """The graph of forward and backward, with the rewrites for attention."""
    whole = simplify_masked_weights(replace_random(whole))
    whole = recompute_scores(split_weighted_sums(whole, _yes), _yes)
    return split_weighted_sums(take_sinks_apart(whole, _yes), _yes)


def _yes(*_: object) -> bool:
    return True


def training_plans(
    fn: Callable[..., Any],
    *args: Tensor,
    gpu: bool = True,
    only: Only | None = None,
    default: bool = False,
    after_split: Callable[[GraphModule], GraphModule] = lambda gm: gm,
) -> list[Schedule]:
    """The schedules of the forward graph, and of the backward one. Both run in eager. By `default` estimates decide, else
    templates of attention take what they can."""
    plans: list[Schedule] = []
    only = None if default else only or (GPU if gpu else CPU)

    def keep(gm: GraphModule, _: Any) -> Any:
        with _disable_current_modes():  # reading constants needs real tensors
            gm = after_split(expand(gm))
            plans.append(plan_of(gm, options_for(gpu, only)))
        return make_boxed_func(gm.forward)

    def split(whole: GraphModule, inputs: Any, **settings: Any) -> Any:
        return torch_adapter._partition(lambda gm: gm, before_split(whole), inputs, **settings)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=split, decompositions=TABLE)

    def rewritten(gm: GraphModule, inputs: Any) -> Any:
        drop_row_shifts(gm)
        return backend(gm, inputs)

    out = torch.compile(fn, backend=rewritten, fullgraph=True)(*args)
    (out if isinstance(out, Tensor) else out[0]).sum().backward()
    return plans
