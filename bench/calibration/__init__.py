"""Problems from the layers of models: what the cost models are fitted to, and what `bench.regret` measures."""

from __future__ import annotations

from bench.calibration import (
    bert,
    convnext,
    efficientnet,
    gpt2,
    llama,
    mamba,
    mobilenetv3,
    moe,
    resnet50,
    t5,
    unet,
    vit,
    whisper,
)  # fmt: skip
from bench.calibration.problem import CLASSES, SIZES, Problem, Size

FAMILIES = (
    resnet50, convnext, efficientnet, mobilenetv3, unet, vit, bert, gpt2, llama, t5, whisper, mamba, moe,
)  # fmt: skip


def problems(size: Size) -> list[Problem]:
    """All of them. Names are unique."""
    found = [one for family in FAMILIES for one in family.problems(size)]
    names = [one.name for one in found]
    assert len({*names}) == len(names), sorted(name for name in {*names} if names.count(name) > 1)
    return found


__all__ = ["CLASSES", "FAMILIES", "SIZES", "Problem", "Size", "problems"]
