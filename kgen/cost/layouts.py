"""What memory layouts cost, in bytes moved, for `kgen/capture/layouts.py`, which weighs them for a whole graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kgen.device import is_rounded

__all__ = ["channels_first", "copy"]

# Times that the library moves each byte of an image that it reorders on its own. At a pointwise convolution it multiplies
# images as they are and loses less. docs/decisions/layouts.md has the measurements.
REORDERED, POINTWISE, COPIED = 2.0, 0.5, 2.0


def copy(value: torch.Tensor) -> int:
    """Of a copy of a tensor with another order of dimensions."""
    return int(_bytes(value) * COPIED)


def channels_first(images: Sequence[torch.Tensor], weight: torch.Tensor) -> int:
    """Of what the library does more at a convolution of images whose channels are not the innermost dimension; 0: nothing."""
    if not _wants_channels_last(images[0]):
        return 0
    share = POINTWISE if math.prod(weight.shape[2:]) == 1 else REORDERED
    return int(sum(map(_bytes, images)) * share)


def _wants_channels_last(image: torch.Tensor) -> bool:
    """Whether the library computes convolutions of such numbers with channels in the lanes of its units. A GPU's library does
    where its matrix units multiply them."""
    if not image.dtype.is_floating_point:
        return False
    if image.device.type == "cpu":
        return image.dtype.itemsize <= 4 and torch.backends.mkldnn.is_available()
    tf32 = image.dtype is torch.float32 and (torch.backends.cudnn.allow_tf32 or is_rounded(image.dtype))
    return image.device.type == "cuda" and (image.dtype.itemsize == 2 or tf32)


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
