"""The check of all configurations goes on behind one that ends its process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from bench import attention_smoke, conv_smoke, gpu_decode, smoke
from bench.smoke import Check, Task
from kgen.templates.contract import Config

CONFIGS = [Config((("SIZE", size),)) for size in (1, 2, 3)]


def checking(says: Callable[[int], str]) -> Callable[[], Check]:
    return lambda: lambda pick: says(pick(CONFIGS).SIZE)


def ends(size: int) -> str:
    if size == 2:
        os._exit(3)
    return ""


def raises(size: int) -> str:
    raise ValueError(f"of size {size}")


def tasks_of(template: str) -> list[Task]:
    return [
        Task("right", checking(lambda size: "")),
        Task("wrong", checking(lambda size: "far off" if size == 3 else "")),
        Task("ending", checking(ends)),
        Task("one", checking(lambda size: f"size {size}"), number=4),
        Task("few", checking(raises), most=1),
        Task("unused", lambda: lambda pick: ""),
        Task("refused", lambda: lambda pick: "", optional=True),
    ]


@pytest.mark.none
def test_all_configurations_are_checked(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "CONCURRENT", 2)
    assert smoke.check(["some"], tasks_of) == 1
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if not line.startswith("some: 13")) == [
        "some: ending: SIZE=2 never ends, or ends its process",
        "some: few: SIZE=1: ValueError: of size 1",
        "some: one: SIZE=2: size 2",
        "some: unused: : it is not used",
        "some: wrong: SIZE=3: far off",
    ]
    assert lines[-1] == "some: 13 checks, 5 failures, 1 tasks refused"


@pytest.mark.none
def test_templates_have_tasks() -> None:
    of = {
        attention_smoke.tasks_of: ("triton_attention", "triton_attention_backward"),
        conv_smoke.tasks_of: (
            "triton_conv",
            "triton_conv_direct",
            conv_smoke.DEPTHWISE,
            "triton_conv_weight",
            conv_smoke.BOXED,
        ),
        gpu_decode.tasks_of: ("triton_attention",),
    }
    for tasks, templates in of.items():
        assert all(len(tasks(template)) > 5 for template in templates)
