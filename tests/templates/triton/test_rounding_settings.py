"""Torch's settings for TF32, those for matmuls and those for convolutions: what kernels do with float32 numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir.plan import Kernel
from tests.rendering import texts_of_a_gpu
from tests.scheduler.selection.test_safe_choices import planned

IMAGE = torch.empty(32, 256, 28, 28).to(memory_format=torch.channels_last)
FILTERS, BIAS = torch.empty(128, 256, 1, 1), torch.empty(128)


def convolved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b))


def test_convolutions_may_round_unless_it_is_forbidden() -> None:
    assert any(
        "PRECISION: tl.constexpr = 'tf32'" in text for text in texts_of_a_gpu(convolved, IMAGE, FILTERS, BIAS).kernels.values()
    )


@pytest.mark.usefixtures("exact_convolutions", "tf32")
def test_the_setting_for_matmuls_is_none_for_convolutions() -> None:
    assert not any("'tf32'" in text for text in texts_of_a_gpu(convolved, IMAGE, FILTERS, BIAS).kernels.values())


def test_matmuls_may_not() -> None:
    plan = planned(lambda x, w: F.relu(x @ w), torch.empty(4096, 1024), torch.empty(1024, 1024))
    assert not any(isinstance(step, Kernel) and step.contracts for step in plan.steps)


SETTINGS = """
import torch
{setting} = "{value}"
import kgen
from kgen.device import is_rounded
options = {{"gpu_interpreter": True, "strict": True, "cache": False}}
f = torch.compile(lambda x, w: torch.relu(x @ w), backend="kgen", options=options)
x, w = torch.randn(33, 64), torch.randn(64, 48)
torch.testing.assert_close(f(x, w), torch.relu(x @ w))
print(is_rounded(torch.float32), is_rounded(torch.float32, windows=True))
"""


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("setting", "value", "rounded"),
    [
        ("torch.backends.cuda.matmul.fp32_precision", "tf32", "True True"),
        ("torch.backends.cudnn.conv.fp32_precision", "ieee", "False False"),
        ("torch.backends.fp32_precision", "ieee", "False False"),
    ],
)
def test_the_newer_settings(setting: str, value: str, rounded: str) -> None:
    """Torch's older ones raise where these were set."""
    program = SETTINGS.format(setting=setting, value=value)
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
    assert found.stdout.strip().endswith(rounded), found.stderr[-2000:]
