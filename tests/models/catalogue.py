"""The architectures, from configurations, with random weights: how to build each, and arguments for it.

`tiny` is for tests on a CPU, `base` for measurements on a GPU. Dropout is off, so that eager and compiled calls agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.zoo.convolutional import STAGES_B0, EfficientNet, ResNet
from tests.models.zoo.diffusion import DiT, UNet
from tests.models.zoo.sequences import GRUModel, LSTMTagger, Mamba
from tests.models.zoo.sparse import DLRM, GNN

SIZES = ("tiny", "base")
Arguments = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """`build` makes the module, `arguments` keyword arguments for a batch and a length (0: the size's own).

    `package` is what has to be installed. `sequence` says whether the length may vary. `graph_breaks` is how many Dynamo
    has on its own, whatever the back end. `calls` bounds the time: tests of models that compile for long are slow."""

    name: str
    build: Callable[[str], nn.Module]
    arguments: Callable[[str, int, int], Arguments]
    package: str = "torch"
    sequence: bool = True
    batch: tuple[int, int] = (2, 8)
    length: tuple[int, int] = (16, 512)

    def inputs(self, size: str, batch: int = 0, length: int = 0) -> Arguments:
        """Keyword arguments on the CPU, in float32 and int64; the same for equal sizes."""
        at = SIZES.index(size)
        torch.manual_seed(1)
        return self.arguments(size, batch or self.batch[at], length or self.length[at])

    def module(self, size: str) -> nn.Module:
        """The module in float32 on the CPU; always the same weights."""
        torch.manual_seed(0)
        made = self.build(size)
        with torch.no_grad():  # no parameter is at a value, such as zero, that hides mistakes
            for p in made.parameters():
                if p.dim() < 2:
                    p.add_(torch.randn_like(p) * 0.05)
        return made


def tokens(vocabulary: tuple[int, int], name: str = "input_ids") -> Callable[[str, int, int], Arguments]:
    def arguments(size: str, batch: int, length: int) -> Arguments:
        return {name: torch.randint(0, vocabulary[SIZES.index(size)], (batch, length))}

    return arguments


def images(side: tuple[int, int], name: str = "x", channels: int = 3) -> Callable[[str, int, int], Arguments]:
    def arguments(size: str, batch: int, _length: int) -> Arguments:
        n = side[SIZES.index(size)]
        return {name: torch.randn(batch, channels, n, n)}

    return arguments


# ---- from transformers ------------------------------------------------------------------------------------------------


def hugging_face(model: str, config: str, tiny: dict[str, Any], base: dict[str, Any]) -> Callable[[str], nn.Module]:
    """A model class with a configuration; both by their names in transformers."""

    def build(size: str) -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**(tiny if size == "tiny" else base))
        return getattr(transformers, model)(made)

    return build


BERT_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY_BERT = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TINY_LLAMA = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "use_cache": False,
}
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
QWEN_600M = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "use_cache": False,
}
MIXTRAL = {
    **LLAMA_1B,
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_local_experts": 8,
}
TINY_DEEPSEEK = {
    **TINY_LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 8,
}
DEEPSEEK = {
    **TINY_DEEPSEEK,
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 4096,
    "moe_intermediate_size": 704,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 256,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "max_position_embeddings": 4096,
}
GPT2_OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
TINY_T5 = {
    "vocab_size": 120,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "use_cache": False,
}
TINY_WHISPER = {
    "vocab_size": 120,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TINY_VIT = {**TINY_BERT, "image_size": 16, "patch_size": 4, "num_labels": 10}
TINY_VIT.pop("vocab_size")
TINY_CLIP_PART = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 16,
}
TINY_CLIP = {
    "projection_dim": 16,
    "text_config": {**TINY_CLIP_PART, "vocab_size": 120, "max_position_embeddings": 32, "eos_token_id": 119},
    "vision_config": {**TINY_CLIP_PART, "image_size": 16, "patch_size": 4},
}
TINY_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "drop_path_rate": 0.0,
    **BERT_OFF,
}


def encoder_decoder(vocabulary: tuple[int, int]) -> Callable[[str, int, int], Arguments]:
    def arguments(size: str, batch: int, length: int) -> Arguments:
        n = vocabulary[SIZES.index(size)]
        shape = (batch, length)
        return {"input_ids": torch.randint(0, n, shape), "decoder_input_ids": torch.randint(0, n, shape)}

    return arguments


def speech(size: str, batch: int, length: int) -> Arguments:
    bins, frames, n = (8, 32, 120) if size == "tiny" else (80, 3000, 51865)
    return {"input_features": torch.randn(batch, bins, frames), "decoder_input_ids": torch.randint(0, n, (batch, length))}


def text_and_images(size: str, batch: int, length: int) -> Arguments:
    n, side = (119, 16) if size == "tiny" else (49407, 224)
    return {"input_ids": torch.randint(0, n, (batch, length)), "pixel_values": torch.randn(batch, 3, side, side)}


# ---- the zoo ------------------------------------------------------------------------------------------------------------


def of_size(tiny: Callable[[], nn.Module], base: Callable[[], nn.Module]) -> Callable[[str], nn.Module]:
    return lambda size: tiny() if size == "tiny" else base()


def noised(size: str, batch: int, _length: int) -> Arguments:
    side = 8 if size == "tiny" else 32
    return {"x": torch.randn(batch, 4, side, side), "t": torch.rand(batch)}


def noised_classes(size: str, batch: int, length: int) -> Arguments:
    return {**noised(size, batch, length), "y": torch.randint(0, 10, (batch,))}


def clicks(size: str, batch: int, _length: int) -> Arguments:
    tables, rows, dense = (3, 20, 5) if size == "tiny" else (26, 100_000, 13)
    return {"dense": torch.randn(batch, dense), "sparse": torch.randint(0, rows, (batch, tables, 4))}


def graph(size: str, batch: int, length: int) -> Arguments:
    nodes, channels = batch * length, 6 if size == "tiny" else 128
    return {"x": torch.randn(nodes, channels), "edges": torch.randint(0, nodes, (2, nodes * 4))}


TINY_STAGES = ((1, 8, 1, 1, 3), (4, 12, 2, 2, 5))
VOCABULARY = (120, 32000)
HF = "transformers"

MODELS = {
    m.name: m
    for m in (
        Model(
            "bert", hugging_face("BertForMaskedLM", "BertConfig", {**TINY_BERT, **BERT_OFF}, BERT_OFF), tokens((120, 30522)), HF
        ),
        Model(
            "gpt2",
            hugging_face(
                "GPT2LMHeadModel",
                "GPT2Config",
                {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **GPT2_OFF},
                GPT2_OFF,
            ),
            tokens((120, 50257)),
            HF,
        ),
        Model(
            "llama",
            hugging_face("LlamaForCausalLM", "LlamaConfig", TINY_LLAMA, LLAMA_1B),
            tokens((120, 128256)),
            HF,
            batch=(2, 4),
        ),
        Model(
            "qwen3",
            hugging_face("Qwen3ForCausalLM", "Qwen3Config", {**TINY_LLAMA, "head_dim": 8}, QWEN_600M),
            tokens((120, 151936)),
            HF,
            batch=(2, 4),
        ),
        Model(
            "mixtral",
            hugging_face("MixtralForCausalLM", "MixtralConfig", {**TINY_LLAMA, "num_local_experts": 4}, MIXTRAL),
            tokens(VOCABULARY),
            HF,
            batch=(2, 4),
        ),
        Model(
            "deepseek",
            hugging_face("DeepseekV3ForCausalLM", "DeepseekV3Config", TINY_DEEPSEEK, DEEPSEEK),
            tokens(VOCABULARY),
            HF,
            batch=(2, 4),
        ),
        Model(
            "t5",
            hugging_face(
                "T5ForConditionalGeneration",
                "T5Config",
                TINY_T5,
                {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0, "use_cache": False},
            ),
            encoder_decoder((120, 32128)),
            HF,
        ),
        Model(
            "whisper",
            hugging_face(
                "WhisperForConditionalGeneration",
                "WhisperConfig",
                {**TINY_WHISPER, "use_cache": False},
                {
                    "d_model": 512,
                    "encoder_layers": 6,
                    "decoder_layers": 6,
                    "encoder_attention_heads": 8,
                    "decoder_attention_heads": 8,
                    "encoder_ffn_dim": 2048,
                    "decoder_ffn_dim": 2048,
                    "use_cache": False,
                },
            ),
            speech,
            HF,
            length=(16, 256),
        ),
        Model(
            "vit",
            hugging_face("ViTForImageClassification", "ViTConfig", {**TINY_VIT, **BERT_OFF}, BERT_OFF),
            images((16, 224), "pixel_values"),
            HF,
            sequence=False,
            batch=(2, 32),
        ),
        Model(
            "clip", hugging_face("CLIPModel", "CLIPConfig", TINY_CLIP, {}), text_and_images, HF, batch=(2, 32), length=(8, 77)
        ),
        Model(
            "convnext",
            hugging_face(
                "ConvNextForImageClassification",
                "ConvNextConfig",
                {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0, "num_labels": 10},
                {},
            ),
            images((32, 224), "pixel_values"),
            HF,
            sequence=False,
            batch=(2, 32),
        ),
        Model(
            "swin",
            hugging_face("SwinForImageClassification", "SwinConfig", TINY_SWIN, {"drop_path_rate": 0.0, **BERT_OFF}),
            images((32, 224), "pixel_values"),
            HF,
            sequence=False,
            batch=(2, 32),
        ),
        Model(
            "mamba_scan",
            hugging_face(
                "MambaForCausalLM",
                "MambaConfig",
                {"vocab_size": 120, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "use_cache": False},
                {"num_hidden_layers": 2, "use_cache": False},
            ),
            tokens(VOCABULARY),
            HF,
            sequence=False,
            length=(8, 64),
        ),
        Model(
            "resnet50",
            of_size(lambda: ResNet((1, 2), 8, 10), lambda: ResNet((3, 4, 6, 3))),
            images((32, 224)),
            sequence=False,
            batch=(2, 32),
        ),
        Model(
            "efficientnet",
            of_size(lambda: EfficientNet(TINY_STAGES, 8, 24, 10), lambda: EfficientNet(STAGES_B0)),
            images((32, 224)),
            sequence=False,
            batch=(2, 32),
        ),
        Model(
            "unet",
            of_size(lambda: UNet(16, (1, 2), (1,), 2), lambda: UNet(192, (1, 2, 3, 4), (1, 2, 3), 8, 32)),
            noised,
            sequence=False,
        ),
        Model(
            "dit",
            of_size(lambda: DiT(32, 2, 4, 4, classes=10), lambda: DiT(768, 12, 12, 16)),
            noised_classes,
            sequence=False,
            batch=(2, 32),
        ),
        Model(
            "mamba",
            of_size(lambda: Mamba(120, 16, 2, 8, 8, 4), lambda: Mamba(32000, 768, 8, 64, 64, 64)),
            tokens(VOCABULARY, "tokens"),
        ),
        Model(
            "dlrm",
            of_size(lambda: DLRM((20, 20, 20), 8, 5, 16, 16), lambda: DLRM((100_000,) * 26, 64, 13, 512, 1024)),
            clicks,
            sequence=False,
            batch=(4, 4096),
        ),
        Model(
            "gru",
            of_size(lambda: GRUModel(120, 16), lambda: GRUModel(32000, 512)),
            tokens(VOCABULARY, "tokens"),
            sequence=False,
            length=(12, 64),
        ),
        Model(
            "lstm",
            of_size(lambda: LSTMTagger(120, 12, 5), lambda: LSTMTagger(32000, 512, 32)),
            tokens(VOCABULARY, "tokens"),
            length=(8, 128),
        ),
        Model("gnn", of_size(lambda: GNN(6, 8, 2, 4), lambda: GNN(128, 64, 8, 40)), graph, length=(16, 2048)),
    )
}
