"""Recurrences: LSTM and GRU, as modules and cell by cell, and a state-space model (Mamba-2) in chunks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LSTMTagger(nn.Module):
    """int64[n, length] tokens -> float[n, length, classes]; both directions, two layers."""

    def __init__(self, vocabulary: int, size: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.lstm = nn.LSTM(size, size, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * size, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class GRUModel(nn.Module):
    """int64[n, length] tokens -> float[n, vocabulary]; one cell, unrolled over time."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.embed, self.cell = nn.Embedding(vocabulary, size), nn.GRUCell(size, size)
        self.head = nn.Linear(size, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = x.new_zeros(x.shape[0], self.size)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def decay_sums(a: Tensor) -> Tensor:
    """float[..., t] -> float[..., t, t]: at (i, j) the sum of a over j+1 ... i, minus infinity above the diagonal."""
    t = a.shape[-1]
    sums = a.cumsum(-1)
    below = torch.ones(t, t, dtype=torch.bool, device=a.device).tril()
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(~below, -torch.inf)


def state_space(x: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """h[t] = exp(a[t]) h[t-1] + b[t] x[t], y[t] = c[t] h[t], by matmuls inside chunks and a recurrence between them.

    x float[n, length, heads, p]; a float[n, length, heads]; b, c float[n, length, s]; length is a multiple of `chunk`.
    """
    n, length, heads, p = x.shape
    x = x.view(n, length // chunk, chunk, heads, p)
    b, c = (v.view(n, length // chunk, chunk, -1) for v in (b, c))
    a = a.view(n, length // chunk, chunk, heads).permute(0, 3, 1, 2)
    sums = a.cumsum(-1)
    inside = torch.einsum("nkis,nkjs,nhkij,nkjhp->nkihp", c, b, decay_sums(a).exp(), x)
    states = torch.einsum("nkjs,nhkj,nkjhp->nkhps", b, (sums[..., -1:] - sums).exp(), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    between = decay_sums(F.pad(sums[..., -1], (1, 0))).exp()
    entering = torch.einsum("nhzk,nkhps->nzhps", between, states)[:, :-1]
    across = torch.einsum("nkis,nkhps,nhki->nkihp", c, entering, sums.exp())
    return (inside + across).reshape(n, length, heads, p)


class MambaBlock(nn.Module):
    """A gated state-space layer with a short causal convolution."""

    def __init__(self, size: int, state: int, head: int, chunk: int) -> None:
        super().__init__()
        self.inner, self.state, self.head, self.chunk = 2 * size, state, head, chunk
        self.heads = self.inner // head
        self.norm = nn.RMSNorm(size)
        self.project = nn.Linear(size, 2 * self.inner + 2 * state + self.heads, bias=False)
        self.conv = nn.Conv1d(self.inner + 2 * state, self.inner + 2 * state, 4, groups=self.inner + 2 * state, padding=3)
        self.step_bias = nn.Parameter(torch.zeros(self.heads))
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, self.heads + 1).float()))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.out_norm, self.out = nn.RMSNorm(self.inner), nn.Linear(self.inner, size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        n, length, _ = u.shape
        z, xbc, step = self.project(self.norm(u)).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        xbc = F.silu(self.conv(xbc.transpose(1, 2))[..., :length].transpose(1, 2))
        x, b, c = xbc.split([self.inner, self.state, self.state], -1)
        step = F.softplus(step + self.step_bias)
        x = x.reshape(n, length, self.heads, self.head)
        y = state_space(x * step[..., None], -self.log_decay.exp() * step, b, c, self.chunk)
        y = (y + x * self.skip[:, None]).reshape(n, length, self.inner)
        return u + self.out(self.out_norm(y * F.silu(z)))


class Mamba(nn.Module):
    """int64[n, length] tokens -> float[n, length, vocabulary]."""

    def __init__(self, vocabulary: int, size: int, depth: int, state: int, head: int, chunk: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.blocks = nn.Sequential(*(MambaBlock(size, state, head, chunk) for _ in range(depth)))
        self.norm, self.lm_head = nn.RMSNorm(size), nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.blocks(self.embed(tokens))))
