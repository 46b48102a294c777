"""Image classifiers: ResNet with bottlenecks, and EfficientNet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def conv_norm(cin: int, cout: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution without a bias, and the normalisation of its channels."""
    conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, cin: int, width: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        cout = width * expansion
        self.reduce = conv_norm(cin, width, 1)
        self.spatial = conv_norm(width, width, 3, stride)
        self.expand = conv_norm(width, cout, 1)
        self.shortcut = conv_norm(cin, cout, 1, stride) if stride > 1 or cin != cout else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.spatial(self.act(self.reduce(x))))
        return self.act(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """float[n, 3, h, w] -> float[n, classes]."""

    def __init__(self, blocks: Sequence[int], width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages, cin = [], width
        for k, count in enumerate(blocks):
            inner = width << k
            for block in range(count):
                stages.append(Bottleneck(cin, inner, 2 if block == 0 and k else 1))
                cin = inner * 4
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(cin, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class SqueezeExcite(nn.Module):
    """Channels scaled by what their means say."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.SiLU(), nn.Conv2d(inner, channels, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.net(x)


class InvertedBottleneck(nn.Module):
    """Expansion, a depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = cin * expansion
        expand = [conv_norm(cin, inner, 1), nn.SiLU()] if expansion > 1 else []
        depthwise = [conv_norm(inner, inner, kernel, stride, groups=inner), nn.SiLU()]
        self.net = nn.Sequential(*expand, *depthwise, SqueezeExcite(inner, max(1, cin // 4)), conv_norm(inner, cout, 1))
        self.residual = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return x + y if self.residual else y


# expansion, channels, blocks, stride and kernel of each stage of B0
STAGES_B0 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class EfficientNet(nn.Module):
    """float[n, 3, h, w] -> float[n, classes]."""

    def __init__(
        self, stages: Sequence[tuple[int, int, int, int, int]], stem: int = 32, head: int = 1280, classes: int = 1000
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, stem, 3, 2), nn.SiLU()]
        cin = stem
        for expansion, cout, count, stride, kernel in stages:
            for block in range(count):
                layers.append(InvertedBottleneck(cin, cout, kernel, stride if block == 0 else 1, expansion))
                cin = cout
        self.features = nn.Sequential(*layers, conv_norm(cin, head, 1), nn.SiLU())
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(head, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))
