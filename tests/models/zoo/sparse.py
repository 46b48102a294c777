"""Models of indices: recommendation by embedding bags (DLRM), and attention along the edges of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """(float[n, dense], int64[n, tables, bag] indices) -> float[n]: dot products of all pairs of embeddings."""

    def __init__(self, rows: Sequence[int], size: int, dense: int, bottom: int, top: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, size, mode="sum") for count in rows)
        self.bottom = mlp([dense, bottom, size])
        count = len(rows) + 1
        self.top = mlp([size + count * (count - 1) // 2, top, 1])
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(sparse[:, k]) for k, table in enumerate(self.tables))], 1)
        dots = vectors @ vectors.transpose(1, 2)
        return torch.sigmoid(self.top(torch.cat([x, dots[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1))


class GraphAttention(nn.Module):
    """(float[nodes, cin], int64[2, edges]) -> float[nodes, heads * cout]: softmax over the edges into each node."""

    def __init__(self, cin: int, cout: int, heads: int) -> None:
        super().__init__()
        self.heads, self.linear = heads, nn.Linear(cin, heads * cout, bias=False)
        self.source = nn.Parameter(torch.randn(heads, cout) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, cout) * 0.1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.linear(x).view(x.shape[0], self.heads, -1)
        scores = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        most = scores.new_full((x.shape[0], self.heads), -torch.inf)
        most = most.scatter_reduce(0, target[:, None].expand_as(scores), scores.detach(), "amax")
        weights = (scores - most[target]).exp()
        total = torch.zeros_like(most).index_add(0, target, weights)
        weights = weights / (total[target] + 1e-9)
        messages = (h[source] * weights[..., None]).to(h.dtype)  # autocast has weights in float32
        out = torch.zeros_like(h).index_add(0, target, messages)
        return out.flatten(1)


class GNN(nn.Module):
    """(float[nodes, cin], int64[2, edges]) -> float[nodes, classes]."""

    def __init__(self, cin: int, size: int, heads: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GraphAttention(cin, size, heads), GraphAttention(heads * size, size, heads)
        self.head = nn.Linear(heads * size, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(F.elu(self.second(F.elu(self.first(x, edges)), edges)))
