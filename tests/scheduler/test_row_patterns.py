"""Plans for a GPU of patterns of rows, forward and backward: how many kernels they take, and that little is read twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codegen import options_for, plan_of
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from bench.patterns import outputs_of
from bench.row_patterns import BF16, BY_NAME, F32, Given, Pattern, after, quantised, rms_norm
from kgen.capture.decompositions import TABLE, TRAINED
from kgen.capture.higher_order import expand
from kgen.capture.rng import replace_random
from kgen.ir.plan import Schedule
from kgen.report.traffic import bytes_minimal, bytes_moved
from kgen.verdict import Outcome, Reason

# Pattern -> kernels of the forward and of the backward graph, and the most that each moves over the least.
FORWARD = {
    "residual layer_norm, 4k": (1, 1.0), "rms_norm, 16k": (1, 1.0), "dropout + residual layer_norm, 4k": (1, 1.0),
    "group_norm + silu": (1, 1.0), "batch_norm + relu": (1, 1.0),
    # channels that are neighbours in memory: partial statistics, their join, one more walk
    "group_norm + silu, channels last": (3, 1.51),
    "log_softmax, 16 rows of 256k": (3, 1.51), "softmax, 1k": (1, 1.0), "softmax, 32k": (1, 1.0), "softmax, 256k": (1, 1.0),
    # the second one adds up the losses of rows; of 8,192 rows it gathers so many logits that a third one joins its shares
    "cross_entropy, 128k": (2, 1.01), "smoothed cross_entropy, 32k": (3, 1.01), "weighted cross_entropy, 32k": (3, 1.01),
    "rms_norm to fp8 by row": (1, 1.0), "rms_norm to fp8 by 128": (1, 1.0), "rms_norm to int8 by row": (1, 1.0),
    "swiglu to fp8 by row": (1, 1.0), "swiglu to fp8 by 128": (1, 1.0), "swiglu to mxfp8": (1, 1.0),
    "dropout": (1, 1.0), "bernoulli": (1, 1.0), "embedding": (1, 1.0), "embedding_bag": (1, 1.0), "segment sum": (2, 1.05),
}  # fmt: skip
BACKWARD = {
    "train layer_norm, 1k": ((1, 2), 1.02), "train layer_norm, 8k": ((1, 2), 1.03), "train rms_norm, 4k": ((1, 2), 1.03),
    "train rms_norm, 16k": ((1, 2), 1.03), "train written rms_norm, 8k": ((1, 2), 1.03),
    "train dropout + residual layer_norm, 4k": ((1, 2), 1.03), "train batch_norm + residual + relu": ((1, 1), 1.01),
    "train softmax, 4k": ((1, 1), 1.0), "train cross_entropy, 128k": ((2, 1), 1.01),
    "train smoothed cross_entropy, 32k": ((3, 1), 1.01),
}  # fmt: skip


def tensors(pattern: Pattern) -> list[Tensor]:
    """Inputs without data."""
    made = [torch.empty(given.shape, dtype=given.dtype) for given in pattern.inputs]
    return [
        one.to(memory_format=torch.channels_last) if given.channels_last else one
        for one, given in zip(made, pattern.inputs, strict=True)
    ]


def plans(pattern: Pattern) -> list[Schedule]:
    """The schedule of the forward graph, and that of the backward graph of a pattern that trains."""
    made: list[Schedule] = []

    def keep(gm: Any, _: Any) -> Any:
        with _disable_current_modes():  # reading constants needs real tensors
            made.append(plan_of(gm, options_for(gpu=True)))
        return gm

    def partition(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return min_cut_rematerialization_partition(expand(replace_random(graph), TRAINED), *args, **kwargs)

    def inference(gm: Any, inputs: Any) -> Any:
        return keep(replace_random(gm), inputs)

    compiled = aot_function(
        pattern.written, keep, keep, partition_fn=partition, decompositions=TABLE, inference_compiler=inference,
        keep_inference_input_mutations=True,
    )  # fmt: skip
    args = tensors(pattern)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(pattern.trains):
        if not pattern.trains:
            compiled(*args)
            return made
        own = [a.detach().requires_grad_(g.learnt and a.is_floating_point()) for a, g in zip(args, pattern.inputs, strict=True)]
        outs = outputs_of(compiled(*own))
        torch.autograd.grad(outs, [a for a in own if a.requires_grad], [torch.ones_like(out) for out in outs])
    return made


def excess(plan: Schedule) -> float:
    return bytes_moved(plan) / bytes_minimal(plan)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    kernels, most = FORWARD[name]
    [plan] = plans(BY_NAME[name])
    assert len(plan.kernels) == kernels, [step.name for step in plan.kernels]
    assert not plan.calls or name in ("dropout", "bernoulli", "dropout + residual layer_norm, 4k")  # these draw a seed
    assert excess(plan) <= most + 1e-3


@pytest.mark.parametrize("name", BACKWARD)
def test_training(name: str) -> None:
    """Backward passes read their operands once; sums of columns are partial ones and a kernel that adds them in order."""
    kernels, most = BACKWARD[name]
    made = plans(BY_NAME[name])
    assert tuple(len(plan.kernels) for plan in made) == kernels
    assert max(map(excess, made)) <= most + 1e-3


@pytest.mark.parametrize("layout", ["", ", channels last"])
def test_the_gradient_of_a_group_norm_computes_its_result_again(layout: str) -> None:
    """What an activation behind it needs for its gradient is made of the input and of the statistics: the forward pass stores
    the statistics alone besides its result."""
    pattern = BY_NAME[f"train group_norm + silu{layout}"]
    forward, backward = plans(pattern)
    x = tensors(pattern)[0].nbytes
    assert bytes_minimal(forward) < 2.01 * x
    assert bytes_minimal(backward) < 3.01 * x


def test_rows_are_stored_and_not_the_logits_of_a_smoothed_loss() -> None:
    [plan] = plans(BY_NAME["smoothed cross_entropy, 32k"])
    logits = tensors(BY_NAME["smoothed cross_entropy, 32k"])[0]
    stored = [out for k in plan.kernels for s in k.statements for out, kept in zip(s.outs, s.stored, strict=True) if kept]
    assert all(
        max(plan.graph.buffers[name].sizes, key=str).as_int() != logits.shape[1]
        for name in stored
        if plan.graph.buffers[name].sizes
    )


def norm_of(columns: int, block: int) -> Pattern:
    return Pattern(
        "norm", after(rms_norm, lambda y: quantised(y, block)), (Given((64, columns), BF16), Given((columns,), BF16))
    )


@pytest.mark.parametrize(("columns", "block"), [(4096, 32), (16384, 128), (384, 128)])
def test_blocks_of_a_row_are_reduced_where_the_row_is(columns: int, block: int) -> None:
    [plan] = plans(norm_of(columns, block))
    assert [v.outcome for v in plan.verdicts if v.reason is Reason.BLOCKS_OF_ROWS] == [Outcome.FUSED]
    assert len(plan.kernels) == 1


def test_blocks_of_a_row_that_registers_do_not_hold_are_apart() -> None:
    [plan] = plans(norm_of(65536, 128))
    assert not any(v.reason is Reason.BLOCKS_OF_ROWS for v in plan.verdicts)
    assert len(plan.kernels) == 3  # the row's sum in two steps


def test_blocks_of_no_power_of_two_are_apart() -> None:
    [plan] = plans(norm_of(3072, 96))
    assert len(plan.kernels) == 2


def returned_too(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = rms_norm(x, w)
    return y, *quantised(y, 128)


def test_a_row_that_is_returned_is_stored_as_well() -> None:
    [plan] = plans(Pattern("norm", returned_too, (Given((64, 1024), F32), Given((1024,), F32))))
    assert len(plan.kernels) == 1
    assert bytes_moved(plan) == bytes_minimal(plan)
