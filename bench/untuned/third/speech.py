"""Blocks of audio front ends, vocoders and speech decoders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def filter_banks(wave: Tensor, window: Tensor, mel: Tensor) -> Tensor:
    """Pre-emphasis, a short-time Fourier transform, logarithms of mel bands, a norm of each band."""
    x = torch.cat((wave[:, :1], wave[:, 1:] - 0.97 * wave[:, :-1]), 1)
    spectrum = torch.stft(x, 400, 160, 400, window.abs(), center=True, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    bands = torch.log(torch.matmul(mel.abs(), power) + 1e-6)
    return (bands - bands.mean(-1, keepdim=True)) / (bands.std(-1, keepdim=True) + 1e-5)


def masked_spectrum(x: Tensor, start: Tensor, width: Tensor, lengths: Tensor) -> Tensor:
    """SpecAugment: two masks of bands and two of steps, filled with the mean; steps past the end are zero."""
    f, t = torch.arange(x.shape[1], device=x.device), torch.arange(x.shape[2], device=x.device)
    low, high = start[:, :2], start[:, :2] + width[:, :2]
    bands = ((f >= low[..., None]) & (f < high[..., None])).any(1)
    early, late = start[:, 2:] * 4, start[:, 2:] * 4 + width[:, 2:]
    steps = ((t >= early[..., None]) & (t < late[..., None])).any(1)
    mean = x.mean((1, 2), keepdim=True)
    y = torch.where(bands[:, :, None] | steps[:, None], mean, x)
    return y.masked_fill(t >= lengths[:, None, None], 0.0)


def with_deltas(x: Tensor, lengths: Tensor) -> Tensor:
    """Features with first and second differences, normalised over the steps of each sequence."""
    kernel = torch.arange(-2, 3, device=x.device, dtype=x.dtype).expand(x.shape[1], 1, 5) / 10
    first = F.conv1d(F.pad(x, (2, 2), mode="replicate"), kernel, groups=x.shape[1])
    second = F.conv1d(F.pad(first, (2, 2), mode="replicate"), kernel, groups=x.shape[1])
    y = torch.cat((x, first, second), 1)
    inside = (torch.arange(x.shape[2], device=x.device) < lengths[:, None])[:, None]
    n = lengths[:, None, None].to(x.dtype)
    mean = (y * inside).sum(2, keepdim=True) / n
    var = (((y - mean) * inside) ** 2).sum(2, keepdim=True) / n
    return ((y - mean) * (var + 1e-5).rsqrt() * inside).transpose(1, 2)


def wavenet(x: Tensor, gates: Tensor, skips: Tensor) -> Tensor:
    """Four gated causal layers with dilations 1, 2, 4, 8; x of (batch, channels, steps)."""
    total = 0.0
    for k in range(4):
        a, b = F.conv1d(F.pad(x, (2**k, 0)), gates[k], dilation=2**k).chunk(2, 1)
        y = F.conv1d(torch.tanh(a) * torch.sigmoid(b), skips[k])
        x, skip = x + y[:, : x.shape[1]], y[:, x.shape[1] :]
        total = total + skip
    return F.relu(total)


def snake_upsample(x: Tensor, v: Tensor, g: Tensor, alpha: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """BigVGAN's stage: a weight-normed transposed convolution, snake, a dilated residual block."""
    w = v * (g / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True))
    x = F.conv_transpose1d(x, w, stride=4, padding=2)
    a = torch.exp(alpha)[None, :, None]

    def snake(t: Tensor) -> Tensor:
        return t + torch.sin(a * t) ** 2 / (a + 1e-9)

    y = F.conv1d(snake(x), w1, padding=3, dilation=3)
    return x + F.conv1d(snake(y), w2, padding=1)


def ctc_forward(logits: Tensor, labels: Tensor) -> Tensor:
    """CTC's forward variables in a Python loop over (batch, steps, classes), class 0 blank."""
    logp = F.log_softmax(logits, -1)
    b, n = labels.shape
    extended = torch.zeros(b, 2 * n + 1, dtype=torch.long, device=labels.device)
    extended[:, 1::2] = labels
    skip = torch.zeros_like(extended, dtype=torch.bool)
    skip[:, 2:] = (extended[:, 2:] != 0) & (extended[:, 2:] != extended[:, :-2])
    emit = logp.gather(2, extended[:, None].expand(-1, logp.shape[1], -1))
    alpha = torch.full_like(emit[:, 0], -1e5)
    alpha[:, :2] = emit[:, 0, :2]
    for t in range(1, logits.shape[1]):
        one = F.pad(alpha[:, :-1], (1, 0), value=-1e5)
        two = F.pad(alpha[:, :-2], (2, 0), value=-1e5)
        two = torch.where(skip, two, torch.full_like(two, -1e5))
        alpha = torch.logsumexp(torch.stack((alpha, one, two)), 0) + emit[:, t]
    return -torch.logaddexp(alpha[:, -1], alpha[:, -2]).mean()


def beam_step(logits: Tensor, scores: Tensor, finished: Tensor, history: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    """One step of a beam search: the best of beams times words, states reordered; logits of (batch, beams, words)."""
    b, k, v = logits.shape
    logp = F.log_softmax(logits.float(), -1)
    done = torch.full_like(logp, float("-inf"))
    done[..., 0] = 0
    logp = torch.where((finished == 0)[..., None], done, logp)
    total, at = (scores[..., None].float() + logp).view(b, -1).topk(k)
    beam, word = torch.div(at, v, rounding_mode="floor"), at % v
    rows = (beam + torch.arange(b, device=at.device)[:, None] * k).view(-1)
    history = torch.cat((history.view(b * k, -1)[rows].view(b, k, -1), word[..., None]), -1)
    return total, word, history, cache.index_select(0, rows)


def transducer_lattice(audio: Tensor, text: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    """A transducer scores audio with text: log probabilities of blank and of the labels."""
    h = torch.tanh(audio[:, :, None] + text[:, None])
    logp = F.log_softmax(F.linear(h, w, b), -1)
    own = logp[:, :, :-1].gather(3, labels[:, None, :, None].expand(-1, audio.shape[1], -1, 1)).squeeze(3)
    return logp[..., 0].logsumexp((1, 2)).mean() + own.mean()


def streaming(x: Tensor, state: Tensor, deep: Tensor, w: Tensor) -> Tensor:
    """A causal depthwise layer on a chunk, its last steps kept in place for the next one."""
    y = torch.cat((state, x), 2)
    state.copy_(y[:, :, -state.shape[2] :])
    z = F.conv1d(y, deep, groups=x.shape[1])
    return x + F.linear(F.silu(z).transpose(1, 2), w).transpose(1, 2)


def contrast_negatives(x: Tensor, codes: Tensor, which: Tensor) -> Tensor:
    """wav2vec 2.0: cosine similarity to the own code and to sampled ones; codes equal to the own one do not count."""
    target = codes.view(-1, codes.shape[-1])
    b, t, n = which.shape
    other = target[which.view(-1)].view(b, t, n, -1)
    both = torch.cat((codes.unsqueeze(2), other), 2)
    logits = F.cosine_similarity(x.unsqueeze(2).float(), both.float(), dim=-1) / 0.1
    equal = (codes.unsqueeze(2) == other).all(-1)
    logits = torch.cat((logits[..., :1], logits[..., 1:].masked_fill(equal, float("-inf"))), -1)
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(b * t, dtype=torch.long, device=x.device))


def length_regulator(x: Tensor, duration: Tensor, out: Tensor) -> Tensor:
    """FastSpeech: each phoneme repeated for its duration, by comparing positions to cumulative sums; out gives the length."""
    end = duration.cumsum(1)
    t = torch.arange(out.shape[1], device=x.device)
    path = (t[None, :, None] < end[:, None]) & (t[None, :, None] >= (end - duration)[:, None])
    return torch.bmm(path.to(x.dtype), x) + out


def multi_resolution(a: Tensor, b: Tensor, window: Tensor) -> Tensor:
    """Spectral convergence and logarithms of magnitudes at two sizes."""
    loss = 0.0
    for n in (256, 126):
        sa, sb = (torch.stft(t, n, n // 4, n, window[:n].abs() + 0.1, return_complex=True) for t in (a, b))
        ma, mb = ((s.real**2 + s.imag**2).clamp(min=1e-3).sqrt() for s in (sa, sb))
        loss = loss + torch.linalg.norm(mb - ma) / torch.linalg.norm(mb) + F.l1_loss(ma.log(), mb.log())
    return loss


def _tracks(m: Make, b: int, c: int, t: int) -> list[Tensor]:
    return [
        m(b, c, t),
        weight(m, c, c // 2, 8),
        m(c, 1, 1).abs(),
        m(c // 2) * 0.1,
        *(weight(m, c // 2, c // 2, 3) for _ in "ab"),
    ]


BLOCKS: tuple[Block, ...] = (
    Sized(filter_banks, lambda m, b, t: [m(b, t), m(400), m(80, 201)], (2, 1700), SINGLE, tf32=True).block(
        "filter banks", 32, 79999
    ),
    Sized(
        masked_spectrum, lambda m, b, f, t: [m(b, f, t), ids(m, f, b, 4), ids(m, 27, b, 4), ids(m, t, b) + 1], (2, 8, 33)
    ).block("masked spectrum", 64, 80, 1501),
    Sized(with_deltas, lambda m, b, f, t: [m(b, f, t), ids(m, t, b) + 1], (2, 5, 19), SINGLE).block(
        "features with deltas", 48, 40, 1203
    ),
    *Sized(
        wavenet,
        lambda m, b, c, s, t: [m(b, c, t), m(4, 2 * c, c, 2) * (2 * c) ** -0.5, m(4, c + s, c, 1) * c**-0.5],
        (1, 6, 5, 23),
        SINGLE,
        tf32=True,
    ).both("gated causal stack", 4, 64, 120, 8001),
    Sized(snake_upsample, _tracks, (1, 6, 11)).block("snake upsampling", 8, 256, 1000, training=True),
    Sized(ctc_forward, lambda m, b, t, c, n: [m(b, t, c), ids(m, c - 1, b, n) + 1], (2, 9, 6, 3), SINGLE).block(
        "ctc forward", 64, 24, 1025, 9, training=True
    ),
    Sized(
        beam_step,
        lambda m, b, k, v, t, d: [m(b, k, v), m(b, k), ids(m, 3, b, k), ids(m, v, b, k, t), m(b * k, t, d)],
        (2, 3, 40, 4, 5),
        HALF,
    ).block("beam search step", 16, 5, 32001, 77, 512),
    Sized(
        transducer_lattice,
        lambda m, b, t, u, d, v: [m(b, t, d), m(b, u + 1, d), weight(m, v, d), m(v), ids(m, v, b, u)],
        (2, 5, 3, 8, 11),
        HALF,
    ).block("transducer lattice", 4, 151, 30, 320, 1001, training=True),
    Sized(streaming, lambda m, b, c, t: [m(b, c, t), m(b, c, 14), weight(m, c, 1, 15), weight(m, c, c)], (2, 6, 5), HALF).block(
        "streaming chunk", 16, 512, 33
    ),
    Sized(contrast_negatives, lambda m, b, t, n, d: [m(b, t, d), m(b, t, d), ids(m, b * t, b, t, n)], (2, 5, 4, 8), HALF).block(
        "contrast to negatives", 8, 200, 100, 256, training=True
    ),
    Sized(
        length_regulator, lambda m, b, n, t, d: [m(b, n, d), ids(m, 9, b, n), m(b, t, d)], (2, 5, 21, 8), SINGLE, tf32=True
    ).block("length regulator", 32, 111, 777, 384, training=True),
    Sized(multi_resolution, lambda m, b, t: [m(b, t), m(b, t), m(256)], (2, 900), SINGLE).block(
        "multi-resolution spectra", 16, 30001, training=True
    ),
)
