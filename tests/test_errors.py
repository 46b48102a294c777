"""Each error class says what happened and what to try, survives a process border, and reaches the user of torch.compile."""

from __future__ import annotations

import pickle
import string
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kgen
from kgen import errors

pytestmark = pytest.mark.none


def classes(base: type[errors.KgenError] = errors.KgenError) -> Iterator[type[errors.KgenError]]:
    for sub in base.__subclasses__():
        yield sub
        yield from classes(sub)


CONCRETE = sorted((c for c in classes() if c.template != errors.KgenError.template), key=lambda c: c.__name__)


def details(kind: type[errors.KgenError]) -> dict[str, str]:
    names = (name for text in (kind.template, kind.hint) for _, name, _, _ in string.Formatter().parse(text) if name)
    return {name: f"<{name}>" for name in names}


@pytest.mark.parametrize("kind", CONCRETE, ids=lambda c: c.__name__)
def test_message_has_every_detail_and_survives_pickling(kind: type[errors.KgenError]) -> None:
    made = kind(**details(kind))
    assert all(value.strip("<>") in str(made) for value in made.details.values())
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), str(again)) == (kind, str(made))


@pytest.mark.parametrize("kind", CONCRETE, ids=lambda c: c.__name__)
def test_blame_is_clear_and_users_get_a_next_step(kind: type[errors.KgenError]) -> None:
    assert issubclass(kind, errors.UserError) != issubclass(kind, errors.InternalError)
    if issubclass(kind, errors.UserError):
        assert kind.hint


@pytest.mark.parametrize(
    ("arguments", "kind", "listed"),
    [
        ({"mode": "fastest"}, errors.UnknownMode, "reduce-overhead"),
        ({"options": {"mode": "fastest"}}, errors.UnknownMode, "max-autotune-no-cudagraphs"),
        ({"options": {"fuse": True}}, errors.UnknownOption, "numerics"),
        ({"options": {"numerics": "exact"}}, errors.BadOptionValue, "stable"),
        ({"options": ["fusion"]}, errors.BadOptionValue, "give a dict of option names to values"),
        ({"options": {"debug": "/dev/null/folder"}}, errors.BadOptionValue, "give a folder that can be written"),
    ],
)
def test_wrong_calls_of_torch_compile(arguments: dict[str, Any], kind: type[errors.KgenError], listed: str) -> None:
    compiled = torch.compile(torch.sin, backend="kgen", **arguments)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=listed) as caught:
        compiled(torch.ones(2))
    assert isinstance(caught.value.inner_exception, kind)
    assert kind.__name__ in str(caught.value)


def test_kgen_compile_refuses_at_once() -> None:
    with pytest.raises(errors.UnknownMode, match="reduce-overhead"):
        kgen.compile(torch.sin, mode="fastest")
    with pytest.raises(errors.UnknownOption, match="numerics"):
        kgen.compile(options={"fuse": True})
