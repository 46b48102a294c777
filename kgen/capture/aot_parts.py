"""What AOTAutograd has compiled of a graph, without the wrappers that it puts around each call.

A wrapper of a training graph takes a tenth of a millisecond of Python: it is there for mutated inputs, aliased results, tokens,
random states and subclasses. A graph that has none of them, proved by AOTAutograd's own metadata, can be called without. All
of this is private to torch, and written for 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # in front of AOTAutograd's runtime: they import each other
from torch._functorch._aot_autograd.runtime_wrappers import (
    AOTDispatchAutograd,
    RuntimeWrapper,
    coerce_to_expected_memory_format,
)
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

__all__ = ["Part", "noted_parts"]

Boxed = Callable[[list[Any]], Sequence[Any]]
# Results in memory of their own.
OWN = (OutputType.non_alias, OutputType.unsafe_view_alias)


class _NothingSaved:
    """In the place of a context whose saved tensors have been taken."""

    @staticmethod
    def maybe_clear_saved_tensors() -> None:
        """There are none."""


@dataclass(frozen=True, slots=True)
class Part:
    """A compiled graph. `node` is AOTAutograd's function for autograd, None where the graph has no gradients."""

    forward: Boxed
    node: Any
    metadata: Any
    disables_autocast: bool

    @property
    def tangents(self) -> list[int]:
        """Numbers of the results that backward takes gradients of, in its order."""
        infos = self.metadata.output_info
        return [k for k, one in enumerate(infos) if getattr(one, "requires_grad_for_backward", one.requires_grad)]

    def backward(self, given: list[Any]) -> Sequence[Any]:
        """Gradients of the operands, from what forward has saved and from tangents. The first call may compile it."""
        compiled = self.node.compiled_bw
        if compiled is None:
            made: Sequence[Any] = self.node._backward_impl(_NothingSaved, given)
            return made
        # what keeps Dynamo away is needed around all calls, not around each
        return getattr(compiled, "_torchdynamo_orig_callable", compiled)(given)

    def settled(self, tangent: torch.Tensor, number: int) -> torch.Tensor:
        """A tangent as backward was traced for it."""
        meta = self.metadata.subclass_tangent_meta[number]
        if type(tangent) is torch.Tensor:
            wanted = meta.memory_format
            is_settled = wanted.stride is not None and tangent.stride() == wanted.stride
            return tangent if is_settled else coerce_to_expected_memory_format(tangent, wanted)
        made: torch.Tensor = AOTDispatchAutograd.process_runtime_tangent(tangent, meta)[0]
        return made

    def is_plain(self, inputs: int, outputs: int) -> bool:
        """Whether a call is a function of as many tensors, which gives as many others in memory of their own."""
        meta = self.metadata
        counts = (
            meta.num_mutated_inp_runtime_indices, meta.num_intermediate_bases, meta.num_graphsafe_rng_states,
            meta.num_backward_tokens, len(meta.tokens), meta.num_symints_saved_for_bw or 0,
            getattr(meta, "num_tensors_saved_with_no_vc_check", 0) or 0,
            getattr(meta, "num_opaque_objects_saved_for_bw", 0) or 0,
        )  # fmt: skip
        return (
            (len(meta.input_info), len(meta.output_info), meta.num_forward_returns) == (inputs, outputs, outputs)
            and not any(counts)
            and not meta.is_rng_op_functionalized
            and not any(one.mutates_data or one.mutates_metadata for one in meta.input_info)
            and all(one.output_type in OWN and issubclass(one.raw_type, torch.Tensor) for one in meta.output_info)
            and all(map(_is_ordinary, (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta, *meta.subclass_tangent_meta)))
            and len(meta.subclass_tangent_meta) == len(self.tangents)
        )

    def check_backward(self) -> None:
        """Raises RuntimeError where AOTAutograd's wrapper does."""
        if self.metadata.deterministic is False and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                "a backward graph was compiled without torch.use_deterministic_algorithms, and is called with it; "
                "try: set it in front of the forward call, too"
            )


def _is_ordinary(meta: Any) -> bool:
    return isinstance(meta, PlainTensorMeta)


_found: ContextVar[list[Part] | None] = ContextVar("kgen_parts", default=None)


@contextmanager
def noted_parts() -> Iterator[list[Part]]:
    """A list of the graphs that AOTAutograd compiles, or loads from its cache, inside."""
    wrap, parts = RuntimeWrapper.post_compile, list[Part]()

    def noting(self: Any, compiled_fn: Any, aot_config: Any, *, runtime_metadata: Any) -> Any:
        found = _found.get()
        if found is not None:
            owner = getattr(compiled_fn, "__self__", None)  # of the method `apply`
            node: Any = owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None
            found.append(Part(node.compiled_fw if node else compiled_fn, node, runtime_metadata, self.disable_amp))
        return wrap(self, compiled_fn, aot_config, runtime_metadata=runtime_metadata)

    token = _found.set(parts)
    RuntimeWrapper.post_compile = noting
    try:
        yield parts
    finally:
        RuntimeWrapper.post_compile = wrap
        _found.reset(token)
