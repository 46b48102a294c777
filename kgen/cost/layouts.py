"""What memory layouts cost, in bytes moved, for `kgen/capture/layouts.py`, which weighs them for a whole graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from kgen.device import is_rounded

__all__ = ["channels_first", "copy", "is_along_one", "wants_channels_last"]

# Times that a copy moves each byte.
COPIED = 2.0
# Times that the library moves each byte of an image that it reorders on its own, by device and kind of convolution
# (docs/decisions/0017-layouts.md). It multiplies matrices, and images of few channels, about as well as they are.
REORDERED: Mapping[str, Mapping[str, float]] = {
    "cpu": {
        "dense": 4.0,
        "grouped": 4.0,
        "whole groups": 0.5,
        "transposed groups": 0.0,
        "depthwise": 1.5,
        "pointwise": 0.5,
        "few": 0.0,
    },
    "cuda": {"dense": 2.0, "depthwise": 0.5, "pointwise": 0.5, "few": 0.0},
}
# oneDNN has kernels for groups of so many channels, or several times as many, that read images as they are: with channels last
# 8 groups of 4 took 1.64 ms and not 1.99 (copies 1.56), and transposed 3.39 and not 2.03 (AMD EPYC, AVX-512, 2026-11-28).
GROUP = 4
# With some channels in each group cuDNN turns images over as well where these are last, and more slowly: 142 us more for
# 16x96x2001 in groups, transposed, and 7.2 ms for the gradient of 3 groups' filters at 16x45x65x66 (H100, bench.untuned).
FEW = 4
# Channels of float32 that a GPU's library makes slowly where they are last: 3 of 64 by 3 x 3 taps took 235 us of 32 x 32, and
# 55 with channels first; 4 took 27 and 43, 3 in bfloat16 21 and 39 (H200, 2026-11-30).
FEW_MADE = 3
# And for each tap of a depthwise convolution of two dimensions on a GPU, of which torch has a kernel of its own where channels
# are not the innermost dimension: 225 us for 25 taps of 32x128x56x56, and 50 with cuDNN's (H100, 2026-11-26, bench.untuned).
TAP = 0.4
# Bytes of a load. cuDNN has fast depthwise kernels for channels in rows of whole loads alone: with 65 channels of 16 bits 4 x 4
# taps took it 418 us, torch's kernel 77; with 3 channels of 32 bits 11 x 11 took 158 and 100 (H200, 2026-11-27, bench.untuned).
LOAD = 16
# Operations of a GPU's library, on numbers of 16 bits and in TF32, in the time in which a byte moves; and how much longer they
# take along rows that begin at so many bytes (`kgen/cost/model.py:ALIGNED_SHARE`).
RATE_OF_HALVES, LONGER_OF_HALVES = 150.0, {16: 0.0, 8: 4.0, 4: 3.5, 2: 6.0}
RATE_OF_ROUNDED, LONGER_OF_ROUNDED = 75.0, {16: 0.0, 8: 0.4, 4: 2.3}


def has_whole_loads(channels: int, dtype: torch.dtype) -> bool:
    """Whether cuDNN has a fast depthwise kernel for so many channels side by side."""
    return channels * dtype.itemsize % LOAD == 0


def is_along_one(weight: torch.Tensor) -> bool:
    """Whether filters have several taps, along one dimension. cuDNN has no fast depthwise kernels of such: the gradient of 2048
    filters of 4 taps took it 780 us with channels last, with copies of its own, and torch's kernel 200 (H200,
    bench.gpu_convs)."""
    return sum(size > 1 for size in weight.shape[2:]) == 1


def copy(value: torch.Tensor) -> int:
    """Of a copy of a tensor with another order of dimensions."""
    return int(_bytes(value) * COPIED)


def channels_first(
    images: Sequence[torch.Tensor], weight: torch.Tensor, groups: int, transposed: bool = False, gaps: bool = False
) -> int:
    """Of what the library does more at a convolution of images whose channels are not the innermost dimension; 0: nothing. A
    GPU's reorders filters too, and their gradient: of small images they are most of it (U-Net at 8 x 8). Channels that are no
    whole loads it pads in either layout, by a kernel of its own where they are last (`temporal layer`, H100, 2026-11-28).
    `gaps` are those of a `transposed` convolution that has steps and is dilated."""
    if not wants_channels_last(images[0]):
        return 0
    device = images[0].device.type
    kind = _kind(weight, groups) if device != "cpu" or groups == 1 else _kind_of_groups(weight, groups, transposed, gaps)
    share = REORDERED[device].get(kind, 0.0)
    if kind == "depthwise" and device == "cuda":
        if not has_whole_loads(images[0].shape[1], images[0].dtype) or is_along_one(weight):
            return 0
        share = max(share, TAP * math.prod(weight.shape[2:]))
    if device != "cuda":
        return int(sum(map(_bytes, images)) * share)
    whole = [one for one in images if has_whole_loads(one.shape[1], one.dtype)]
    filters = COPIED * len(images) * _bytes(weight) if kind == "dense" and whole else 0.0
    waiting = _unaligned(images, weight) if kind == "pointwise" and len(whole) == len(images) else 0.0
    return int(sum(map(_bytes, whole)) * share + filters + waiting)


def _unaligned(images: Sequence[torch.Tensor], weight: torch.Tensor) -> float:
    """Bytes that move in the time that a GPU's library takes more for matmuls along rows of positions that are no whole loads.
    With channels last in their place, blocks with images of 65 x 129, 65 x 65 and 49 x 49 took .50, .57 and .65 of their time
    (H200, 2026-12-01, bench.untuned, docs/decisions/0056-attention-of-few-rows-or-keys.md)."""
    if not has_whole_loads(weight.shape[0], weight.dtype):
        return 0.0
    size = weight.dtype.itemsize
    aligned = math.gcd(LOAD, math.prod(images[0].shape[2:]) * size)
    narrow = size == torch.float16.itemsize
    rate, longer = (RATE_OF_HALVES, LONGER_OF_HALVES) if narrow else (RATE_OF_ROUNDED, LONGER_OF_ROUNDED)
    flops = 2 * images[0].shape[0] * math.prod(images[0].shape[2:]) * weight.numel() * len(images)
    return flops / rate * longer[aligned]


def _kind(weight: torch.Tensor, groups: int) -> str:
    if groups > 1:
        return "depthwise" if weight.shape[1] == 1 else "grouped"
    made = FEW_MADE if weight.dtype is torch.float32 and weight.device.type == "cuda" else 0
    if weight.shape[1] <= FEW or weight.shape[0] <= made:
        return "few"
    return "pointwise" if math.prod(weight.shape[2:]) == 1 else "dense"


def _kind_of_groups(weight: torch.Tensor, groups: int, transposed: bool, gaps: bool) -> str:
    """oneDNN multiplies the matrices of transposed groups with gaps, which takes it twice as long with channels last."""
    if weight.shape[1] == 1:
        return "depthwise"
    is_whole = weight.shape[1] % GROUP == 0 and weight.shape[0] // groups % GROUP == 0
    if transposed and (gaps or is_whole):
        return "transposed groups"
    return "whole groups" if is_whole else "grouped"


def wants_channels_last(image: torch.Tensor) -> bool:
    """Whether the library computes convolutions of such numbers with channels in the lanes of its units. A GPU's library does
    where its matrix units multiply them."""
    if not image.dtype.is_floating_point:
        return False
    if image.device.type == "cpu":
        return image.dtype.itemsize <= 4 and torch.backends.mkldnn.is_available()
    return image.device.type == "cuda" and (image.dtype.itemsize == 2 or is_rounded(image.dtype, windows=True))


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
