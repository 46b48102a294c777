"""Small models for a CPU: image models at 64 and 224 points a side, and a language model. `transformers` has most of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]


class _Dense(nn.Module):
    """A dense block: every layer reads all results before it."""

    def __init__(self, channels: int, layers: int, growth: int) -> None:
        super().__init__()
        counts = [channels + k * growth for k in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in counts)
        self.narrow = nn.ModuleList(nn.Conv2d(n, 4 * growth, 1, bias=False) for n in counts)
        self.between = nn.ModuleList(nn.BatchNorm2d(4 * growth) for _ in counts)
        self.wide = nn.ModuleList(nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False) for _ in counts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, narrow, between, wide in zip(self.norms, self.narrow, self.between, self.wide, strict=True):
            y = wide(F.relu(between(narrow(F.relu(norm(x))))))
            x = torch.cat([x, y], 1)
        return x


def _densenet() -> nn.Module:
    """DenseNet (Huang et al. 2017) of three blocks of four layers."""
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 32
    for _ in range(3):
        parts += [_Dense(channels, 4, 16), nn.BatchNorm2d(channels + 64), nn.ReLU(), nn.Conv2d(channels + 64, channels, 1)]
        parts.append(nn.AvgPool2d(2))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class _Inverted(nn.Module):
    """An inverted residual with squeeze and excitation, of MobileNetV3 (Howard et al. 2019)."""

    def __init__(self, channels: int, inner: int, kernel: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
        depthwise = nn.Conv2d(inner, inner, kernel, padding=kernel // 2, groups=inner, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(inner), nn.Hardswish())
        self.squeeze, self.excite = nn.Conv2d(inner, inner // 4, 1), nn.Conv2d(inner // 4, inner, 1)
        self.project = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        found: Tensor = x + self.project(y * scale)
        return found


def _mobilenet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
    blocks = [_Inverted(16, 64, 3), _Inverted(16, 72, 5), nn.Conv2d(16, 40, 1, 2), _Inverted(40, 120, 5), _Inverted(40, 240, 3)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 1000))


class _First(nn.Module):
    """The first result of a model of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x)[0]
        return found


def _image(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return _First(getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**options)))

    return make


def _deepseek() -> Made:
    import transformers

    config = transformers.DeepseekV3Config(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=64,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, vocab_size=1000, use_cache=False,
    )  # fmt: skip
    return _First(transformers.DeepseekV3Model(config)), (torch.randint(0, 1000, (2, 64)),)


IMAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "densenet": _densenet,
    "mobilenet_v3": _mobilenet,
    "resnet18": _image("ResNet", layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512]),
    "resnet50": _image("ResNet"),
    "convnext": _image("ConvNext", depths=[1, 1, 2, 1], hidden_sizes=[48, 96, 192, 384]),
    "efficientnet": _image("EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
    "segformer": _image("Segformer", depths=[1, 1, 1, 1]),
}


def _at(make: Callable[[], nn.Module], size: int) -> Callable[[], Made]:
    return lambda: (_normalized(make(), size), (torch.randn(1, 3, size, size),))


@torch.no_grad()
def _normalized(model: nn.Module, size: int) -> nn.Module:
    """The model with statistics of its own activations. Random weights shrink them layer by layer; in a deep model they
    become subnormal numbers, and the time is that of their arithmetic: EfficientNet's was four times as long."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(torch.randn(2, 3, size, size))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


CPU_MODELS: dict[str, Callable[[], Made]] = {
    **{f"{name} {size}": _at(make, size) for name, make in IMAGE_MODELS.items() for size in (64, 224)},
    "deepseek_v3 tiny": _deepseek,
}
