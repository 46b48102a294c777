"""Plans of attention and its gradients on tensors without data, for a GPU or for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from kgen.capture import torch_adapter
from kgen.capture.decompositions import TABLE

from kgen.capture.rng import replace_random  # isort: skip  it defines an operator that the other one names
from kgen.capture.recompute_scores import recompute_scores
from kgen.ir.plan import Schedule
from kgen.only import Only
from tests.codegen import options_for, plan_of

GPU = Only(
    "triton_attention", lambda configs: configs[0], also=("triton_attention_backward", "triton_attention_backward_values")
)
CPU = Only("cpp_attention", lambda configs: configs[0], also=("cpp_attention_backward", "cpp_attention_backward_values"))


def training_plans(fn: Callable[..., Any], *args: Tensor, gpu: bool = True) -> list[Schedule]:
    """The schedules of the forward graph, and of the backward one."""
    plans: list[Schedule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        with _disable_current_modes():  # reading constants needs real tensors
            plans.append(plan_of(gm, options_for(gpu, GPU if gpu else CPU)))
        return gm

    def split(joint: GraphModule, inputs: Any, **settings: Any) -> Any:
        joint = recompute_scores(replace_random(joint), lambda _: True)
        return torch_adapter._partition(lambda gm: gm, joint, inputs, **settings)

    compiled = aot_function(fn, keep, keep, partition_fn=split, decompositions=TABLE, keep_inference_input_mutations=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = tuple(torch.empty_like(a).requires_grad_(a.requires_grad) for a in args)
        out = compiled(*args)
        out.sum().backward()
    return plans
