"""Models whose depth is checked: each with its inputs, and whether torch.fx can trace it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from collect.models import Adversarial, Branches, Recurrent, ResNet, UNet
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    keywords: dict[str, Any] = field(default_factory=dict)
    traceable: bool = False  # by torch.fx


def numbers(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape),)


def tokens(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(1, 20, shape),)


def benchmark_unet() -> nn.Module:
    from benchmarks.models import UNet as Benchmark

    return Benchmark(width=8)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=23, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=23,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
        )
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=23,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=16,
            max_position_embeddings=8,
        )
    )


class Experts(nn.Module):
    """A mixture of experts: a router sends each token to two of four."""

    def __init__(self, width: int = 6, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                mixed.index_add_(0, row, weights[row, slot, None] * expert(tokens[row]))
        return self.head(mixed.view_as(x) + x)


class Mixer(nn.Module):
    """Two streams that exchange halves, squeeze and excitation, a residual in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.squeeze = nn.Sequential(nn.Linear(6, 2), nn.ReLU(inplace=True), nn.Linear(2, 6), nn.Sigmoid())
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.chunk(self.left(x), 2, dim=1)
        y = torch.cat([b, a], dim=1)
        z = self.right(y) * self.squeeze(y)
        z += x
        return self.out(self.norm(z).relu_() - y.detach())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 2, 16, batch_first=True)


#: Depths are compared with the oracle on all of these.
POISONED: dict[str, Model] = {
    "the benchmarks' U-Net": Model(benchmark_unet, numbers(1, 3, 16, 16), traceable=True),
    "a U-Net": Model(UNet, numbers(2, 1, 8, 8), traceable=True),
    "a ResNet": Model(ResNet, numbers(2, 1, 8, 8), traceable=True),
    "a transformer encoder": Model(encoder, numbers(2, 5, 8)),
    "an encoder and a decoder": Model(transformer, lambda: (torch.randn(2, 4, 8), torch.randn(2, 3, 8))),
    "recurrent": Model(Recurrent, numbers(2, 4, 3)),
    "GPT-2": Model(gpt2, tokens(2, 6), {"use_cache": False}),
    "BERT": Model(bert, tokens(2, 6)),
    "ViT": Model(vit, numbers(2, 3, 8, 8)),
    "Llama": Model(llama, tokens(2, 6), {"use_cache": False}),
    "two streams": Model(Mixer, numbers(5, 6), traceable=True),
}

#: Depths are written by hand: poison would change what is called, or cannot pass integers.
BY_HAND: dict[str, Model] = {
    "experts": Model(Experts, numbers(2, 5, 6)),
    "everything at once": Model(Adversarial, numbers(4, 6)),
    "branches on values": Model(Branches, lambda: (torch.ones(2, 3), -torch.ones(2, 3))),
}
