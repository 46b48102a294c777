"""`generate()` of transformers with a static KV cache: eager's tokens, and a graph each for the prompt and for a token.

A cache is a module's state that each call writes in place. Its position is a tensor, so no token needs a graph of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kgen
from tests.models.catalogue import MODELS

TOKENS, PROMPT = 12, 7
stats = torch._dynamo.utils.counters


def model(name: str) -> nn.Module:
    """A tiny one, with logits far enough apart that rounding does not choose another token."""
    pytest.importorskip("transformers")
    made = MODELS[name].module("tiny").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    made.generation_config.update(bos_token_id=1, decoder_start_token_id=1, eos_token_id=None, pad_token_id=0)
    return made


def prompt(name: str, seed: int, length: int = PROMPT) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32)}
    tokens = torch.randint(3, 120, (2, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def generated(module: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """The tokens, chosen greedily; no token a second time, as models with random weights say one again and again."""
    settings = {"max_new_tokens": TOKENS, "no_repeat_ngram_size": 1, "do_sample": False, "use_cache": True}
    made = module.generate(**inputs, **settings, **options)
    assert isinstance(made, Tensor)
    return made


def check(module: nn.Module, prompts: list[dict[str, Tensor]]) -> list[int]:
    """Eager's tokens, nothing replaced, no graph break; returns how many graphs there were after each prompt."""
    expected = [generated(module, inputs) for inputs in prompts]
    stats.clear()
    kgen.coverage_reset()
    module.forward = torch.compile(module.forward, backend="kgen", mode="reduce-overhead")
    counts = []
    for inputs, tokens in zip(prompts, expected, strict=True):
        assert torch.equal(generated(module, inputs, cache_implementation="static"), tokens)
        counts.append(int(stats["stats"]["unique_graphs"]))
    assert kgen.coverage()["graphs"] == counts[-1]
    assert not kgen.coverage()["replaced"]
    assert not stats["graph_break"]
    return counts


@pytest.mark.cpu
def test_one_layer() -> None:
    module = model("gpt2")
    module.transformer.h, module.config.n_layer = module.transformer.h[:1], 1
    assert check(module, [prompt("gpt2", seed) for seed in range(2)]) == [2, 2]


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "t5", "whisper"])
def test_all(name: str) -> None:
    """A prompt of another length, and so a cache of another capacity, may need both graphs again; further ones need none."""
    module = model(name)
    lengths = (PROMPT, PROMPT, PROMPT + 4, PROMPT + 5, PROMPT + 9)
    counts = check(module, [prompt(name, seed, length) for seed, length in enumerate(lengths)])
    assert counts[:2] == [2, 2]
    assert len(set(counts[2:])) == 1
    assert counts[-1] <= 4
