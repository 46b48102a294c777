"""Whole models with random weights, from `timm` and `transformers` where these are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]


def _timm(name: str, batch: int, size: int = 224) -> Callable[[], Made]:
    def make() -> Made:
        import timm

        model = timm.create_model(name, num_classes=1000).to(memory_format=torch.channels_last)
        return model, (torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last),)

    return make


def _t5(batch: int, length: int) -> Callable[[], Made]:
    def make() -> Made:
        from transformers import T5Config, T5Model

        model = T5Model(T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, use_cache=False))
        tokens = torch.randint(0, 32000, (batch, length))
        return _Tokens(model, True), (tokens, tokens[:, : length // 4].contiguous())

    return make


def _text(kind: str, batch: int, length: int) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")())
        return _Tokens(model, False), (torch.randint(0, 30000, (batch, length)),)

    return make


class _Tokens(nn.Module):
    """A model's last hidden state as a function of its tokens."""

    def __init__(self, model: nn.Module, decodes: bool) -> None:
        super().__init__()
        self.model, self.decodes = model, decodes

    def forward(self, tokens: Tensor, more: Tensor | None = None) -> Tensor:
        options = {"decoder_input_ids": more} if self.decodes else {}
        found: Tensor = self.model(input_ids=tokens, **options)[0]
        return found


GPU_MODELS: dict[str, Callable[[], Made]] = {
    "resnet50": _timm("resnet50", 32),
    "convnext_tiny": _timm("convnext_tiny", 32),
    "vit_base": _timm("vit_base_patch16_224", 32),
    "efficientnet_b0": _timm("efficientnet_b0", 32),
    "t5_base": _t5(8, 512),
    "bert_base": _text("Bert", 16, 512),
    "gpt2": _text("GPT2", 8, 1024),
}
