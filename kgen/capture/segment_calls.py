"""Calls of segments, one behind the other, as one node of autograd.

AOTAutograd makes each graph that it compiles a node of its own, with wrappers around each call. For a run of equal layers that
is a tenth of a millisecond a layer. Here the compiled graphs are called as they are: forward in order, backward in the other
one. A value that several segments read has the sum of its gradients, as autograd would make it.
"""

from __future__ import annotations

import itertools
from collections import Counter
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


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Slots that a call has gradients for, by their numbers: those of the graph's arguments that only this call reads, and
    others. The former wait until all calls are through: Python is slow behind kernels that have emptied the caches."""

    own: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, int], ...]


class Calls:
    """The calls of a run, from the slots `inputs` to the slots `made`. Values of other slots live no longer than needed."""

    def __init__(self, calls: Sequence[Call], size: int, inputs: int, made: Sequence[int], constant: Sequence[int]) -> None:
        """`constant` are numbers of what is made that has no gradient."""
        self.calls, self.size, self.inputs, self.made, self.constant = calls, size, inputs, made, constant
        self.has_gradients = any(call.part.node is not None for call in calls)
        self.disables_autocast = any(call.part.disables_autocast for call in calls)
        readers = Counter(slot for call in calls for slot in call.inputs)
        self._gradients = [self._gradients_of(call, readers) for call in calls]

    def _gradients_of(self, call: Call, readers: Counter[int]) -> _Gradients:
        pairs = list(enumerate(call.inputs))
        own = tuple(pair for pair in pairs if pair[1] < self.inputs and readers[pair[1]] == 1)
        return _Gradients(own, tuple(pair for pair in pairs if pair not in own))

    def __call__(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """What is at the slots `made`."""
        if self.has_gradients:
            with torch.enable_grad():
                made: Sequence[torch.Tensor] = _Run.apply(self, *args)
                return made
        if not torch.is_grad_enabled():
            return self.forward(args, None)
        with torch.no_grad():
            return self.forward(args, None)

    def forward(self, args: Sequence[Any], saved: list[Sequence[torch.Tensor]] | None) -> list[torch.Tensor]:
        """Appends to `saved` what the backward of each call needs."""
        if self.disables_autocast:
            with torch._C._DisableAutocast():
                return self._forward(args, saved)
        return self._forward(args, saved)

    def _forward(self, args: Sequence[Any], saved: list[Sequence[torch.Tensor]] | None) -> list[torch.Tensor]:
        values: list[Any] = [*args, *[None] * (self.size - len(args))]
        for call in self.calls:
            results = call.part.forward([values[slot] for slot in call.inputs])
            for slot, number in call.outputs:
                values[slot] = results[number]
            if saved is not None:
                saved.append(results[call.results :])
            del results
            for slot in call.dead:
                values[slot] = None
        return [_owner(values[slot]) for slot in self.made]

    def backward(self, saved: list[list[torch.Tensor]], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the inputs. Empties `saved`, so that memory is free as soon as a call is through."""
        found: list[Any] = [None] * self.size
        waiting = list[tuple[_Gradients, list[Any]]]()
        for slot, one in zip(self.made, given, strict=True):
            found[slot] = one
        with torch._C._DisableAutocast():
            for call, slots in zip(reversed(self.calls), reversed(self._gradients), strict=True):
                kept, has_tangents = saved.pop(), False
                for number, result in enumerate(call.tangents):
                    tangent, found[result.slot] = found[result.slot], None
                    has_tangents |= tangent is not None
                    kept.append(call.part.settled(result.zeros() if tangent is None else tangent, number))
                    del tangent
                if has_tangents:
                    made = call.part.backward(kept)
                    for number, slot in slots.others:
                        gradient = made[number]
                        if isinstance(gradient, torch.Tensor):  # added in no place: it may be the gradient of two values
                            found[slot] = gradient if found[slot] is None else found[slot] + gradient
                    waiting.append((slots, [made[number] for number, _ in slots.own]))  # no other gradient lives longer
                    del made
        for slots, own in waiting:
            for (_, slot), gradient in zip(slots.own, own, strict=True):
                found[slot] = gradient
        return found[: self.inputs]


def _owner(value: torch.Tensor) -> torch.Tensor:
    """A result that autograd takes for no view: nobody else has its memory."""
    return torch.ops.aten._unsafe_view(value, value.shape) if value._is_view() else value


def _is_batch(one: torch.Tensor | None) -> bool:
    """Whether a tangent is one of `is_grads_batched`, which compiled code would read as if it were not."""
    return one is not None and torch._C._functorch.is_legacy_batchedtensor(one)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: Calls, *args: Any) -> Any:
        saved = list[Sequence[torch.Tensor]]()
        results = calls.forward(args, saved)
        ctx.calls, ctx.counts = calls, list(map(len, saved))
        ctx.save_for_backward(*[one.detach() if one._is_view() else one for part in saved for one in part])
        ctx.mark_non_differentiable(*(results[number] for number in calls.constant))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *given: Any) -> Any:
        calls: Calls = ctx.calls
        if torch._C._functorch.peek_interpreter_stack() is not None or any(map(_is_batch, given)):
            raise RuntimeError(
                "a compiled backward graph cannot be called inside of vmap, grad or vjp, nor with batches of gradients; "
                "try: have the transform in the compiled function, or leave the function whose gradients these are to eager"
            )
        flat = iter(ctx.saved_tensors)
        saved = [[*itertools.islice(flat, count)] for count in ctx.counts]
        del flat
        ctx.maybe_clear_saved_tensors()
        calls.calls[0].part.check_backward()
        if torch.is_grad_enabled():
            return _Second.apply(calls, saved, torch.empty(0, requires_grad=True), *given)
        return (None, *calls.backward(saved, given))


class _Second(torch.autograd.Function):
    """What says that there are no second gradients, to who asks for some."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, saved: list[list[torch.Tensor]], _: Any, *given: Any) -> Any:
        return (None, *calls.backward(saved, given))

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        raise RuntimeError(
            "a compiled graph has no double backward; try: leave what needs second gradients out of torch.compile"
        )
