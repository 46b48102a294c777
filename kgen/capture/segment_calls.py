"""Calls of segments, one behind the other, as one node of autograd.

AOTAutograd makes each graph that it compiles a node of its own, with wrappers around each call. For a run of equal layers that
is a tenth of a millisecond a layer. Here the compiled graphs are called as they are: forward in order, backward in the other
one. A value that several segments read has the sum of its gradients, as autograd would make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.capture.aot_parts import Part

__all__ = ["Call", "Calls"]


@dataclass(frozen=True, slots=True)
class Tangent:
    """A result that has a gradient: where it is among a run's values, and what zeros for it are made of."""

    slot: int
    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a compiled graph. `outputs` are slots by the numbers of the results, `dead` what nobody reads behind it."""

    part: Part
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    results: int
    dead: tuple[int, ...]
    tangents: tuple[Tangent, ...]


class Calls:
    """The calls of a run, from the slots `inputs` to the slots `made`. Values of other slots live no longer than needed."""

    def __init__(self, calls: Sequence[Call], size: int, inputs: int, made: Sequence[int], constant: Sequence[int]) -> None:
        """`constant` are numbers of what is made that has no gradient."""
        self.calls, self.size, self.inputs, self.made, self.constant = calls, size, inputs, made, constant
        self.has_gradients = any(call.part.node is not None for call in calls)
        self.disables_autocast = any(call.part.disables_autocast for call in calls)

    def __call__(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """What is at the slots `made`."""
        if self.has_gradients:
            with torch.enable_grad():
                made: Sequence[torch.Tensor] = _Run.apply(self, *args)  # type: ignore[no-untyped-call]
                return made
        if not torch.is_grad_enabled():
            return self.forward(args, None)
        with torch.no_grad():
            return self.forward(args, None)

    def forward(self, args: Sequence[Any], saved: list[list[torch.Tensor]] | None) -> list[torch.Tensor]:
        """Appends to `saved` what the backward of each call needs."""
        if self.disables_autocast:
            with torch._C._DisableAutocast():
                return self._forward(args, saved)
        return self._forward(args, saved)

    def _forward(self, args: Sequence[Any], saved: list[list[torch.Tensor]] | None) -> list[torch.Tensor]:
        values: list[Any] = [*args, *[None] * (self.size - len(args))]
        for call in self.calls:
            results = call.part.forward([values[slot] for slot in call.inputs])
            for slot, number in call.outputs:
                values[slot] = results[number]
            if saved is not None:
                saved.append([one.detach() if one._is_view() else one for one in results[call.results :]])
            del results
            for slot in call.dead:
                values[slot] = None
        return [_owner(values[slot]) for slot in self.made]

    def backward(self, saved: list[list[torch.Tensor]], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the inputs. Empties `saved`, so that memory is free as soon as a call is through."""
        found: list[Any] = [None] * self.size
        for slot, one in zip(self.made, given, strict=True):
            found[slot] = one
        with torch._C._DisableAutocast():
            for call in reversed(self.calls):
                kept = saved.pop()
                tangents = [found[one.slot] for one in call.tangents]
                for one in call.tangents:
                    found[one.slot] = None
                if any(one is not None for one in tangents):
                    kept += map(call.part.settled, _filled(call, tangents), range(len(tangents)))
                    del tangents
                    _add(found, call.inputs, call.part.backward(kept))
        return found[: self.inputs]


def _owner(value: torch.Tensor) -> torch.Tensor:
    """A result that autograd takes for no view: nobody else has its memory."""
    return torch.ops.aten._unsafe_view(value, value.shape) if value._is_view() else value  # type: ignore[no-any-return]


def _filled(call: Call, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [made.zeros() if one is None else one for made, one in zip(call.tangents, tangents, strict=True)]


def _add(found: list[Any], slots: Sequence[int], gradients: Sequence[Any]) -> None:
    """Adds gradients to those that are there. Never in place: one tensor may be the gradient of two values."""
    for slot, one in zip(slots, gradients, strict=True):
        if isinstance(one, torch.Tensor):
            found[slot] = one if found[slot] is None else found[slot] + one


class _Run(torch.autograd.Function):
    boxed_grads_call = True  # since torch 2.13: gradients come as one list, and can be let go

    @staticmethod
    def forward(ctx: Any, calls: Calls, *args: Any) -> Any:
        saved = list[list[torch.Tensor]]()
        results = calls.forward(args, saved)
        ctx.calls, ctx.counts = calls, list(map(len, saved))
        ctx.save_for_backward(*(one for part in saved for one in part))
        ctx.mark_non_differentiable(*(results[number] for number in calls.constant))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch._dynamo.disable
    def backward(ctx: Any, *given: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "It looks like you're trying to call a compiled backward function within vmap/grad/vjp, which isn't supported. "
                "Try wrapping vmap inside torch.compile, or skip compiling the backward function."
            )
        calls: Calls = ctx.calls
        gradients = [*given[0]] if given and isinstance(given[0], list) else [*given]
        if given and isinstance(given[0], list):
            given[0].clear()
        del given
        flat, saved = iter(ctx.saved_tensors), list[list[torch.Tensor]]()
        for count in ctx.counts:
            saved.append([next(flat) for _ in range(count)])
        del flat
        ctx.maybe_clear_saved_tensors()
        calls.calls[0].part.check_backward()
        if torch.is_grad_enabled():
            return _Second.apply(calls, saved, torch.empty(0, requires_grad=True), *gradients)  # type: ignore[no-untyped-call]
        return (None, *calls.backward(saved, gradients))


class _Second(torch.autograd.Function):
    """What says that there are no second gradients, to who asks for some."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, saved: list[list[torch.Tensor]], _: Any, *given: Any) -> Any:  # noqa: ARG004
        return (None, *calls.backward(saved, given))

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")
