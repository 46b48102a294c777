"""A trial run of a body on tensors without data, which sees each operator that PyTorch comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kgen.capture.batching import RESHAPES_IN_PLACE
from kgen.capture.regions import Refused, tensors_of
from kgen.capture.torch_adapter import own_fake_mode, storage_of

__all__ = ["Trial", "tried"]

aten = torch.ops.aten


def tried(body: GraphModule, given: Sequence[torch.Tensor], layouts: bool) -> tuple[Sequence[Any], Trial]:
    """What a body gives for tensors without data, and the trial. Raises Refused where it is more than a function of them."""
    trial = Trial({storage_of(one) for one in given}, layouts)
    try:
        with own_fake_mode(given), torch.no_grad(), trial:
            results: Sequence[Any] = Interpreter(body).run(*given)
    except Refused:
        raise
    except Exception as cause:
        raise Refused(f"{type(cause).__name__}: {cause}") from cause
    return results, trial


class Trial(TorchDispatchMode):
    """Raises Refused at an operator that makes a body more than a function of its operands."""

    def __init__(self, given: set[int], layouts: bool) -> None:
        super().__init__()
        self.given, self.layouts = given, layouts
        self.writes = False  # into memory of its own: what nothing reads may still be needed
        self.written = set[int]()  # all memory that was written into
        self.work = 0  # floating-point operations of contractions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = _arguments(func, args, kwargs or {})
        self._check_writes(func, named)
        if torch.Tag.nondeterministic_seeded in func.tags and named.get("dropout_p") != 0.0:
            raise Refused(f"{func} draws random numbers")
        if self.layouts and func is aten.convolution.default:
            raise Refused(f"{func}: strides are chosen for what is around it, too")
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        self.work += int(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0
        return result

    def _is_own_view(self, func: Any, named: Mapping[str, Any]) -> bool:
        """Whether dimensions are moved, of a tensor that the body has made: elements stay where they are."""
        own = self.given.isdisjoint(map(storage_of, tensors_of(list(named.values()))))
        return own and func in (aten.squeeze_.dim, aten.squeeze_.default, aten.unsqueeze_.default, aten.t_.default)

    def _check_writes(self, func: Any, named: Mapping[str, Any]) -> None:
        if func.__name__.partition(".")[0] in RESHAPES_IN_PLACE and not self._is_own_view(func, named):
            raise Refused(f"{func} changes the sizes of a tensor that was there")
        if (named.get("training") or named.get("train")) and named.get("running_mean") is not None:
            raise Refused(f"{func} updates statistics")
        for argument in func._schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            self.writes |= writes
            storages = {storage_of(one) for one in tensors_of(named.get(argument.name))} if writes else set[int]()
            self.written |= storages
            if not storages.isdisjoint(self.given):
                raise Refused(f"{func} writes into what the block is given")


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(func, torch._ops.OpOverload):
        raise Refused(f"{func} is no operator of PyTorch")
    declared = func._schema.arguments
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return {**given, **{argument.name: one for argument, one in zip(declared, args, strict=False)}, **kwargs}
