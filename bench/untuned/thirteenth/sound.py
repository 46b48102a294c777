"""Whole layers of networks for speech, music and other sounds: encoders, recognition, synthesis, codecs, separation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE = torch.float32


def layer_normed(x: Tensor, g: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], g[0], g[1])


def normed(x: Tensor, g: Tensor) -> Tensor:
    """A batch norm in training, gain and shift in the rows of g."""
    return F.batch_norm(x, None, None, g[0], g[1], True)


def heads(x: Tensor, size: int) -> Tensor:
    """(b, n, c) as (b, heads, n, size)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def unit_kernel(v: Tensor, g: Tensor) -> Tensor:
    """Weight norm: filters of length g."""
    return v * (g / v.float().norm(dim=(1, 2), keepdim=True)).to(v.dtype)


# ---- recognition ----------------------------------------------------------------------------------------------------------


def mel_stem(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, at: Tensor) -> Tensor:
    """Whisper's stem: logarithms of mel bands clamped near their maximum, two convolutions with GELU, positions."""
    y = torch.log10(x.float().square().clamp(min=1e-10))
    y = ((torch.maximum(y, y.amax((1, 2), keepdim=True) - 8) + 4) / 4).to(x.dtype)
    y = F.gelu(F.conv1d(F.gelu(F.conv1d(y, w, b, padding=1)), v, c, stride=2, padding=1))
    return y.permute(0, 2, 1) + at


def spoken_layer(x: Tensor, sound: Tensor, *w: Tensor) -> Tensor:
    """Whisper's decoder layer: causal attention, attention to sound, an MLP; keys have no bias, both factors are scaled."""
    n1, wq, bq, wk, wv, bv, wo, bo, n2, cq, cbq, ck, cv, cbv, co, cbo, n3, up, bu, down, bd = w
    size = 64 if x.shape[-1] >= 64 else 4

    def attention(y: Tensor, z: Tensor, p: tuple[Tensor, ...], causal: bool) -> Tensor:
        q, k, v = F.linear(y, p[0], p[1]), F.linear(z, p[2]), F.linear(z, p[3], p[4])
        q, k, v = (heads(t, size) for t in (q, k, v))
        s = (q * size**-0.25) @ (k * size**-0.25).mT
        if causal:
            s = s + torch.full(s.shape[-2:], -math.inf, device=s.device, dtype=s.dtype).triu(1)
        y = s.float().softmax(-1).to(v.dtype) @ v
        return F.linear(y.permute(0, 2, 1, 3).flatten(2), p[5], p[6])

    y = layer_normed(x, n1)
    x = x + attention(y, y, (wq, bq, wk, wv, bv, wo, bo), True)
    x = x + attention(layer_normed(x, n2), sound, (cq, cbq, ck, cv, cbv, co, cbo), False)
    return x + F.linear(F.gelu(F.linear(layer_normed(x, n3), up, bu)), down, bd)


def wave_encoder(
    x: Tensor, first: Tensor, norm: Tensor, three: Tensor, two: Tensor, n: Tensor, wp: Tensor, bp: Tensor
) -> Tensor:
    """wav2vec 2.0: a wave through seven strided convolutions, the first one's channels normed over time, projected."""
    y = F.conv1d(x[:, None], first, stride=5)
    y = F.gelu(F.group_norm(y, y.shape[1], norm[0], norm[1]))
    for w in (*three, *two):
        y = F.gelu(F.conv1d(y, w, stride=2))
    return F.linear(layer_normed(y.transpose(1, 2), n), wp, bp)


def wave_encoder_norms(x: Tensor, first: Tensor, three: Tensor, biases: Tensor, norms: Tensor) -> Tensor:
    """The large wav2vec 2.0: a bias and a layer norm over channels after each strided convolution, GELU."""
    x = F.layer_norm(x, x.shape[1:])
    y = x[:, None]
    for k, w in enumerate((first, *three)):
        y = F.conv1d(y, w, biases[k], stride=2 if k else 5)
        y = F.gelu(layer_normed(y.transpose(-2, -1), norms[k]).transpose(-2, -1))
    return y


def position_layer(x: Tensor, v: Tensor, g: Tensor, b: Tensor, n: Tensor) -> Tensor:
    """wav2vec 2.0's positions: a grouped convolution of 128 steps with weight norm by tap, the last step cut, GELU, a norm."""
    w = v * (g / v.float().norm(dim=(0, 1), keepdim=True)).to(v.dtype)
    y = F.conv1d(x.transpose(1, 2), w, b, padding=v.shape[2] // 2, groups=x.shape[2] // v.shape[1])
    return layer_normed(x + F.gelu(y[:, :, :-1]).transpose(1, 2), n)


def conformer_block(x: Tensor, *w: Tensor) -> Tensor:
    """A whole conformer block: half an MLP, attention with relative positions, a convolution, half an MLP, a norm."""
    norms, u1, d1, qkv, wp, bu, bv, wo, a, dw, nb, b, u2, d2 = w
    c, size = x.shape[-1], bu.shape[-1]
    n = x.shape[1]
    x = x + 0.5 * F.linear(F.silu(F.linear(layer_normed(x, norms[0]), u1)), d1)
    at = torch.arange(n - 1, -n, -1, device=x.device, dtype=torch.float32)
    rate = torch.exp(torch.arange(0, c, 2, device=x.device) * (-math.log(1e4) / c))
    angles = at[:, None] * rate
    p = heads(F.linear(torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(x.dtype), wp)[None], size)
    q, k, v = (heads(t, size) for t in F.linear(layer_normed(x, norms[1]), qkv).chunk(3, -1))
    shifted = F.pad((q + bv[:, None]) @ p.mT, (1, 0)).unflatten(-1, (2 * n, 1))
    shifted = shifted.reshape(*q.shape[:2], 2 * n, n)[:, :, 1:].reshape(*q.shape[:3], 2 * n - 1)[..., :n]
    s = ((q + bu[:, None]) @ k.mT + shifted) * size**-0.5
    x = x + F.linear((s.softmax(-1) @ v).transpose(1, 2).flatten(2), wo)
    y = F.glu(F.conv1d(layer_normed(x, norms[2]).transpose(1, 2), a), 1)
    y = F.conv1d(y, dw, padding=dw.shape[2] // 2, groups=c)
    x = x + F.conv1d(F.silu(normed(y, nb)), b).transpose(1, 2)
    x = x + 0.5 * F.linear(F.silu(F.linear(layer_normed(x, norms[3]), u2)), d2)
    return layer_normed(x, norms[4])


def subsampled(x: Tensor, lengths: Tensor, a: Tensor, ba: Tensor, b: Tensor, bb: Tensor, w: Tensor, bw: Tensor) -> Tensor:
    """ESPnet's input layer: mel bands as a picture, two 3x3 convolutions in steps of two, a linear layer, padding as zeros."""
    y = F.relu(F.conv2d(F.relu(F.conv2d(x[:, None], a, ba, stride=2)), b, bb, stride=2))
    y = F.linear(y.transpose(1, 2).flatten(2), w, bw) * len(bw) ** 0.5
    seen = torch.arange(y.shape[1], device=x.device) < lengths[:, None] // 4
    return y * seen[..., None]


def clipped_maps(x: Tensor, lengths: Tensor, a: Tensor, na: Tensor, b: Tensor, nb: Tensor) -> Tensor:
    """Deep Speech 2: two wide convolutions of a spectrogram, norms, a ReLU clipped at 20, what is past the end set to zero."""
    y = x[:, None]
    for w, n, step in ((a, na, (2, 2)), (b, nb, (2, 1))):
        y = F.conv2d(y, w, stride=step, padding=(w.shape[2] // 2, w.shape[3] // 2))
        past = torch.arange(y.shape[3], device=x.device) >= lengths[:, None, None, None] // 2
        y = y.masked_fill(past, 0)
        y = F.hardtanh(normed(y, n), 0, 20).masked_fill(past, 0)
    return y.flatten(1, 2).permute(2, 0, 1)


def label_paths(x: Tensor, labels: Tensor, n: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A recogniser's head: a norm, logits of words' parts, their logarithms, torch's CTC loss of padded labels."""
    y = F.linear(layer_normed(x, n), w, b).float().log_softmax(-1).transpose(0, 1)
    steps = torch.full((len(x),), x.shape[1], device=x.device)
    sizes = torch.arange(len(x), device=x.device) % (labels.shape[1] // 2) + labels.shape[1] // 2
    return F.ctc_loss(y, labels + 1, steps, sizes, zero_infinity=True)


def pair_network(x: Tensor, t: Tensor, labels: Tensor, we: Tensor, be: Tensor, wp: Tensor, wo: Tensor, bo: Tensor) -> Tensor:
    """A transducer's network of all pairs of frames and labels: sums, tanh, logits, logarithms of blank and of the next."""
    y = torch.tanh(F.linear(x, we, be)[:, :, None] + F.linear(t, wp)[:, None])
    y = F.linear(y, wo, bo).float().log_softmax(-1)
    blank = y[..., 0]
    after = y[:, :, :-1].gather(-1, labels[:, None, :, None].expand(-1, y.shape[1], -1, 1))[..., 0]
    return -(blank.mean() + after.mean())


def pooled_speakers(x: Tensor, labels: Tensor, a: Tensor, ba: Tensor, na: Tensor, b: Tensor, *w: Tensor) -> Tensor:
    """ECAPA: attention over frames from features with their mean and spread, weighted moments, angles to all speakers."""
    n1, wf, n2, wc = w
    std = x.var(2, keepdim=True).clamp(min=1e-4).sqrt()
    y = torch.cat([x, x.mean(2, keepdim=True).expand_as(x), std.expand_as(x)], 1)
    s = F.conv1d(torch.tanh(normed(F.relu(F.conv1d(y, a, ba)), na)), b).softmax(2)
    mean = (x * s).sum(2)
    std = ((x.square() * s).sum(2) - mean.square()).clamp(min=1e-4).sqrt()
    y = normed(F.linear(normed(torch.cat([mean, std], 1), n1), wf), n2)
    cosine = F.linear(F.normalize(y), F.normalize(wc)).float()
    sine = (1 - cosine.square()).clamp(min=1e-5).sqrt()
    near = torch.where(cosine > math.cos(math.pi - 0.2), cosine * math.cos(0.2) - sine * math.sin(0.2), cosine - 0.04)
    own = F.one_hot(labels, len(wc)).to(cosine.dtype)
    return F.cross_entropy(30 * (own * near + (1 - own) * cosine), labels)


def split_frames(x: Tensor, *w: Tensor) -> Tensor:
    """ECAPA's block: 1x1, eight parts each convolved with the one before added, 1x1, channels weighted, the input added."""
    a, na, ws, bs, ns, b, nb, down, bd, up, bu = w
    y = normed(F.relu(F.conv1d(x, a)), na)
    parts = list(y.chunk(8, 1))
    for k in range(1, 8):
        z = parts[k] if k == 1 else parts[k] + parts[k - 1]
        parts[k] = normed(F.relu(F.conv1d(z, ws[k - 1], bs[k - 1], padding=2, dilation=2)), ns[k - 1])
    y = normed(F.relu(F.conv1d(torch.cat(parts, 1), b)), nb)
    s = F.conv1d(F.relu(F.conv1d(y.mean(2, keepdim=True), down, bd)), up, bu)
    return x + y * torch.sigmoid(s)


# ---- synthesis ------------------------------------------------------------------------------------------------------------


def mixed_kernels(x: Tensor, up: Tensor, gu: Tensor, *w: Tensor) -> Tensor:
    """HiFi-GAN: weight-normed, four times as long; residual blocks of kernels 3, 7 and 11 in three dilations, averaged."""
    x = F.conv_transpose1d(F.leaky_relu(x, 0.1), unit_kernel(up, gu), stride=4, padding=2)
    out = 0
    for vs, gs, bs in zip(w[::3], w[1::3], w[2::3], strict=True):
        y = x
        for k, far in enumerate((1, 3, 5)):
            pad = vs.shape[-1] // 2
            z = F.conv1d(F.leaky_relu(y, 0.1), unit_kernel(vs[k, 0], gs[k, 0]), bs[k, 0], padding=far * pad, dilation=far)
            y = y + F.conv1d(F.leaky_relu(z, 0.1), unit_kernel(vs[k, 1], gs[k, 1]), bs[k, 1], padding=pad)
        out = out + y
    return out / 3


def period_critic(real: Tensor, fake: Tensor, *w: Tensor) -> Tensor:
    """HiFi-GAN's critic of a period of five: waves folded with mirrored ends, columns convolved; features matched."""
    pad = -real.shape[-1] % 5
    y = F.pad(torch.cat([real, fake])[:, None], (0, pad), "reflect")
    y = y.view(len(y), 1, -1, 5)
    features = []
    for k in range(0, len(w) - 2, 2):
        step = 3 if k < len(w) - 4 else 1
        y = F.leaky_relu(F.conv2d(y, w[k], w[k + 1], stride=(step, 1), padding=(2, 0)), 0.1)
        features.append(y)
    scores = F.conv2d(y, w[-2], w[-1], padding=(1, 0)).flatten(1).float()
    match = 0
    for f in features:
        a, b = f.float().chunk(2)
        match = match + (a - b).abs().mean()
    return 2 * match + (1 - scores[len(real) :]).square().mean() + scores[: len(real)].square().mean()


def scale_critic(x: Tensor, *w: Tensor) -> Tensor:
    """MelGAN's critic of a scale: a mean pool, wide grouped convolutions in large steps, hinges of its scores."""
    y = F.avg_pool1d(x[:, None], 4, 2, padding=2)
    for k in range(0, len(w) - 1, 2):
        v = w[k]
        step = 4 if v.shape[2] == 41 else 1
        y = F.conv1d(y, v, w[k + 1], stride=step, padding=v.shape[2] // 2, groups=y.shape[1] // v.shape[1])
        y = F.leaky_relu(y, 0.2)
    real, fake = F.conv1d(y, w[-1], padding=1).float().chunk(2)
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def codec_encoder(x: Tensor, first: Tensor, *w: Tensor) -> Tensor:
    """EnCodec's encoder: causal convolutions with mirrored starts, residual units and ELU, ever longer steps."""

    def conv(x: Tensor, v: Tensor, step: int = 1) -> Tensor:
        pad = v.shape[2] - step
        extra = -(x.shape[2] - v.shape[2] + pad) % step
        return F.conv1d(F.pad(x, (pad, extra), "reflect"), v, stride=step)

    y = conv(x, first)
    for k, step in enumerate((2, 4, 5, 8)):
        a, b, s, d = w[4 * k : 4 * k + 4]
        y = conv(y, s) + conv(F.elu(conv(F.elu(y), a)), b)
        y = conv(F.elu(y), d, step)
    return conv(F.elu(y), w[16])


def inverse_frames(x: Tensor, *w: Tensor) -> Tensor:
    """Vocos: a ConvNeXt layer of frames, sizes and phases from a linear layer, inverse transforms overlapped and added."""
    dw, bw, n, up, bu, down, bd, gamma, n2, wo, bo, window = w
    y = F.conv1d(x, dw, bw, padding=3, groups=len(dw)).transpose(1, 2)
    y = gamma * F.linear(F.gelu(F.linear(layer_normed(y, n), up, bu)), down, bd)
    y = layer_normed((x + y.transpose(1, 2)).transpose(1, 2), n2)
    size, phase = F.linear(y, wo, bo).float().chunk(2, -1)
    size = size.exp().clamp(max=100.0)
    frames = torch.fft.irfft(torch.complex(size * phase.cos(), size * phase.sin()), dim=-1) * window.float()
    length, step = frames.shape[-1], frames.shape[-1] // 4
    total = step * (frames.shape[1] - 1) + length
    wave = F.fold(frames.mT, (1, total), (1, length), stride=(1, step))[:, 0, 0]
    square = window.float().square().expand(1, frames.shape[1], -1).mT
    envelope = F.fold(square, (1, total), (1, length), stride=(1, step))[:, 0, 0]
    return wave[:, length // 2 : -length // 2] / envelope[:, length // 2 : -length // 2].clamp(min=0.1)


def after_net(x: Tensor, wanted: Tensor, *w: Tensor) -> Tensor:
    """Tacotron 2: five convolutions with norms and tanh refine mel frames; squared errors before and after."""
    y = x
    for k in range(0, len(w), 2):
        y = normed(F.conv1d(y, w[k], padding=2), w[k + 1])
        y = torch.tanh(y) if k < len(w) - 2 else y
    return F.mse_loss(x, wanted) + F.mse_loss(x + y, wanted)


def located_steps(q: Tensor, memory: Tensor, *w: Tensor) -> Tensor:
    """Tacotron 2's attention in four steps: scores from queries, memory and where the weights so far have been."""
    wq, wm, conv, wl, v = w
    key = F.linear(memory, wm)
    weights = torch.zeros(len(memory), memory.shape[1], device=q.device, dtype=q.dtype)
    total, out = weights, []
    for k in range(q.shape[1]):
        at = F.conv1d(torch.stack([weights, total], 1), conv, padding=conv.shape[2] // 2).transpose(1, 2)
        s = (torch.tanh(F.linear(q[:, k : k + 1], wq) + key + F.linear(at, wl)) * v).sum(-1)
        weights = s.softmax(-1)
        total = total + weights
        out.append(torch.bmm(weights[:, None], memory))
    return torch.cat(out, 1)


def phoneme_block(x: Tensor, lengths: Tensor, pitch: Tensor, *w: Tensor) -> Tensor:
    """FastSpeech 2: an encoder layer whose MLP is convolutions of nine and one, then the predictor of pitch and its loss."""
    qkv, bqkv, wo, bo, n1, up, bu, down, bd, n2, a, ba, na, b, bb, nb, wp = w
    size = 128 if x.shape[-1] >= 128 else 4
    past = torch.arange(x.shape[1], device=x.device) >= lengths[:, None].clamp(min=2)
    q, k, v = (heads(t, size) for t in F.linear(x, qkv, bqkv).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=~past[:, None, None])
    y = layer_normed(F.linear(y.transpose(1, 2).flatten(2), wo, bo) + x, n1).masked_fill(past[..., None], 0)
    z = F.conv1d(F.relu(F.conv1d(y.transpose(1, 2), up, bu, padding=4)), down, bd).transpose(1, 2)
    y = layer_normed(y + z, n2).masked_fill(past[..., None], 0)
    for u, bias, n in ((a, ba, na), (b, bb, nb)):
        y = layer_normed(F.relu(F.conv1d(y.transpose(1, 2), u, bias, padding=1)).transpose(1, 2), n)
    far = (F.linear(y, wp)[..., 0] - pitch).float().square().masked_fill(past, 0)
    return far.sum() / (~past).sum()


def posterior_waves(x: Tensor, g: Tensor, noise: Tensor, prior: Tensor, *w: Tensor) -> Tensor:
    """VITS' posterior encoder: gated layers with a speaker's vector, a sample, the divergence from a prior."""
    a, ba, cond, bc, ws, bs, rs, rb, b, bb = w
    y = F.conv1d(x, a, ba)
    c = y.shape[1]
    gs = F.conv1d(g, cond, bc)
    out = torch.zeros_like(y)
    for k in range(len(ws)):
        z = F.conv1d(y, ws[k], bs[k], padding=2) + gs[:, 2 * c * k : 2 * c * (k + 1)]
        z = F.conv1d(torch.tanh(z[:, :c]) * torch.sigmoid(z[:, c:]), rs[k], rb[k])
        y, out = y + z[:, :c], out + z[:, c:]
    mean, log = F.conv1d(out, b, bb).float().chunk(2, 1)
    z = mean + noise.float() * log.exp()
    pm, pl = prior.float().chunk(2, 1)
    return (pl - log - 0.5 + 0.5 * (z - pm).square() * torch.exp(-2 * pl)).mean()


def delayed_codes(codes: Tensor, tables: Tensor, n: Tensor, w: Tensor) -> Tensor:
    """MusicGen: four codebooks each a step later than the one before, embeddings summed, a head for each, masked loss."""
    b, q, t = codes.shape
    size = tables.shape[1] - 1
    filled = torch.full((b, q, t + q), size, device=codes.device)
    for k in range(q):
        filled[:, k, k + 1 : k + 1 + t] = codes[:, k]
    x = sum(F.embedding(filled[:, k, :-1], tables[k]) for k in range(q))
    logits = torch.stack([F.linear(layer_normed(x, n), w[k]) for k in range(q)], 1).float()
    wanted = filled[:, :, 1:]
    return F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=size)


# ---- separation and losses ------------------------------------------------------------------------------------------------


def separated(x: Tensor, enc: Tensor, *w: Tensor) -> Tensor:
    """Conv-TasNet: a learned basis, four dilated depthwise layers with norms over all, masks of two speakers, waves again."""
    n0, a, wo, dec = w[0], w[1], w[-2], w[-1]
    y = F.relu(F.conv1d(x[:, None], enc, stride=enc.shape[2] // 2))
    z = F.conv1d(F.group_norm(y, 1, n0[0], n0[1], eps=1e-8), a)
    total = 0
    for k in range(4):
        up, s1, n1, dw, s2, n2, res, skip = w[2 + 8 * k : 10 + 8 * k]
        t = F.group_norm(F.prelu(F.conv1d(z, up), s1), 1, n1[0], n1[1], eps=1e-8)
        t = F.conv1d(t, dw, padding=2**k, dilation=2**k, groups=len(dw))
        t = F.group_norm(F.prelu(t, s2), 1, n2[0], n2[1], eps=1e-8)
        z, total = z + F.conv1d(t, res), total + F.conv1d(t, skip)
    masks = torch.sigmoid(F.conv1d(F.relu(total), wo)).unflatten(1, (2, -1))
    return F.conv_transpose1d((masks * y[:, None]).flatten(0, 1), dec, stride=enc.shape[2] // 2).view(len(x), 2, -1)


def complex_encoder(x: Tensor, *w: Tensor) -> Tensor:
    """DCCRN: complex convolutions as four real ones, norms, PReLU, three levels of a spectrogram, the last step cut."""
    for k in range(0, len(w), 4):
        re, im, n, slope = w[k : k + 4]
        a, b = F.pad(x, (1, 0)).chunk(2, 1)

        def conv(t: Tensor, v: Tensor) -> Tensor:
            return F.conv2d(t, v, stride=(2, 1), padding=(2, 0))

        y = torch.cat([conv(a, re) - conv(b, im), conv(a, im) + conv(b, re)], 1)
        x = F.prelu(normed(y, n), slope)
    return x


def compressed_spectra(x: Tensor, clean: Tensor, window: Tensor) -> Tensor:
    """Enhanced speech: spectra with sizes to the power 0.3, errors of sizes and of complex values, and a ratio of waves."""

    def spectrum(t: Tensor) -> Tensor:
        n = len(window)
        return torch.stft(t.float(), n, n // 4, window=window.float(), center=True, return_complex=True)

    a, b = spectrum(x), spectrum(clean)
    sa, sb = (torch.view_as_real(t).square().sum(-1).clamp(min=1e-9).sqrt() for t in (a, b))
    ra, rb = torch.view_as_real(a) * (sa**-0.7)[..., None], torch.view_as_real(b) * (sb**-0.7)[..., None]
    loss = 0.7 * (sa**0.3 - sb**0.3).square().mean() + 0.3 * (ra - rb).square().mean()
    x, clean = x - x.mean(1, keepdim=True), clean - clean.mean(1, keepdim=True)
    target = (x * clean).sum(1, keepdim=True) / (clean.square().sum(1, keepdim=True) + 1e-8) * clean
    ratio = target.square().sum(1) / ((x - target).square().sum(1) + 1e-8)
    return loss - 0.01 * (10 * torch.log10(ratio + 1e-8)).mean()


def pitch_frames(x: Tensor, *w: Tensor) -> Tensor:
    """CREPE: normed frames of 1024 samples, a convolution of 512 taps, ReLU, norms and pools, a mean of cents by weights."""
    y = ((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True).clamp(min=1e-10))[:, None, :, None]
    for k in range(0, len(w) - 2, 3):
        v, b, n = w[k : k + 3]
        taps = v.shape[2]
        pad = (taps // 2 - 2, taps // 2 - 2) if k == 0 else ((taps - 1) // 2, taps // 2)
        y = F.relu(F.conv2d(F.pad(y, (0, 0, *pad)), v, b, stride=(1 if k else 4, 1)))
        y = F.max_pool2d(F.batch_norm(y, n[2], n[3], n[0], n[1], False), (2, 1))
    p = torch.sigmoid(F.linear(y.permute(0, 2, 1, 3).flatten(1), w[-2], w[-1]))
    at = torch.arange(p.shape[1], device=x.device)
    near = (at - p.argmax(1, keepdim=True)).abs() <= 4
    share = p * near
    return (share * (20.0 * at + 1997.3794)).sum(1) / share.sum(1)


# ---- sizes ----------------------------------------------------------------------------------------------------------------


def biased(m: Make, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Weights of layers, each with its bias."""
    return [t for s in shapes for t in (weight(m, *s), m(s[0]))]


def lengths(m: Make, b: int, n: int) -> Tensor:
    """Lengths of b sequences of at most n, at least half of it."""
    return n - ids(m, n // 2, b)


STEM = Sized(
    mel_stem,
    lambda m, b, k, t, c: [m(b, k, t), *biased(m, (c, k, 3), (c, c, 3)), m(t // 2, c)],
    (2, 5, 8, 6),
)
SPOKEN = Sized(
    spoken_layer,
    lambda m, b, n, s, c: [
        m(b, n, c),
        m(b, s, c),
        *(t for _ in range(2) for t in (m(2, c), *biased(m, (c, c)), weight(m, c, c), *biased(m, (c, c), (c, c)))),
        m(2, c),
        *biased(m, (4 * c, c), (c, 4 * c)),
    ],
    (2, 5, 7, 8),
)
WAVES = Sized(
    wave_encoder,
    lambda m, b, n, c, o: [
        m(b, n),
        weight(m, c, 1, 10),
        m(2, c),
        m(4, c, c, 3) * (3 * c) ** -0.5,
        m(2, c, c, 2) * (2 * c) ** -0.5,
        m(2, c),
        *biased(m, (o, c)),
    ],
    (2, 1200, 4, 6),
)
CONFORMER = Sized(
    conformer_block,
    lambda m, b, n, c, d, k: [
        m(b, n, c),
        m(5, 2, c),
        weight(m, 4 * c, c),
        weight(m, c, 4 * c),
        weight(m, 3 * c, c),
        weight(m, c, c),
        m(c // d, d) / 4,
        m(c // d, d) / 4,
        weight(m, c, c),
        weight(m, 2 * c, c, 1),
        weight(m, c, 1, k),
        m(2, c),
        weight(m, c, c, 1),
        weight(m, 4 * c, c),
        weight(m, c, 4 * c),
    ],
    (2, 6, 8, 4, 3),
)
MIXED = Sized(
    mixed_kernels,
    lambda m, b, c, t: [
        m(b, 2 * c, t),
        m(2 * c, c, 8),
        m(2 * c, 1, 1).abs() + 0.5,
        *(
            z
            for k in (3, 7, 11)
            for z in (m(3, 2, c, c, k), m(3, 2, c, 1, 1).abs() / 2 + 0.3, m(3, 2, c))
        ),
    ],
    (1, 4, 12),
)  # fmt: skip
CODEC = Sized(
    codec_encoder,
    lambda m, b, n, c: [
        m(b, 1, n),
        weight(m, c, 1, 7),
        *(
            t
            for k, step in enumerate((2, 4, 5, 8))
            for w in [c << k]
            for t in (
                weight(m, w // 2, w, 3),
                weight(m, w, w // 2, 1),
                weight(m, w, w, 1),
                weight(m, 2 * w, w, 2 * step),
            )
        ),
        weight(m, 4 * c, 16 * c, 7),
    ],
    (1, 2600, 2),
)
SEPARATED = Sized(
    separated,
    lambda m, b, n, f, k, c, h: [
        m(b, n),
        weight(m, f, 1, k),
        m(2, f),
        weight(m, c, f, 1),
        *(
            t
            for _ in range(4)
            for t in (
                weight(m, h, c, 1),
                m(1),
                m(2, h),
                weight(m, h, 1, 3),
                m(1),
                m(2, h),
                weight(m, c, h, 1),
                weight(m, c, h, 1),
            )
        ),
        weight(m, 2 * f, c, 1),
        weight(m, f, 1, k),
    ],
    (2, 60, 5, 4, 3, 6),
)


def pitch_inputs(m: Make, b: int, c: int, first: int) -> list[Tensor]:
    widths = [1, 32 * c, 4 * c, 4 * c, 4 * c, 8 * c, 16 * c]
    out = [m(b, 1024)]
    for k in range(6):
        o = widths[k + 1]
        out += [weight(m, o, widths[k], 64 if k else first, 1), m(o), torch.cat([m(3, o), m(1, o).abs() + 0.5])]
    return [*out, *biased(m, (360, 64 * c))]


BLOCKS: tuple[Block, ...] = (
    STEM.block("mel stem", 16, 80, 3000, 768),
    STEM.block("mel stem", 8, 128, 3000, 1280, training=True),
    SPOKEN.block("spoken layer", 8, 448, 1500, 768, training=True),
    SPOKEN.block("spoken layer", 40, 1, 1500, 1280),
    WAVES.block("wave encoder", 4, 250000, 512, 768),
    WAVES.block("wave encoder", 4, 100003, 512, 768, training=True),
    Sized(
        wave_encoder_norms,
        lambda m, b, n, c: [m(b, n), weight(m, c, 1, 10), m(4, c, c, 3) * (3 * c) ** -0.5, m(5, c), m(5, 2, c)],
        (2, 600, 4),
    ).block("wave encoder norms", 4, 80000, 512, training=True),
    Sized(
        position_layer,
        lambda m, b, n, c, g, k: [m(b, n, c), m(c, c // g, k), m(1, 1, k).abs() * 2 + 1, m(c), m(2, c)],
        (2, 9, 8, 2, 6),
    ).block("position layer", 8, 499, 768, 16, 128, training=True),
    CONFORMER.block("conformer block", 16, 400, 512, 64, 31, training=True),
    CONFORMER.block("conformer block", 8, 753, 256, 64, 15),
    Sized(
        subsampled,
        lambda m, b, t, k, c: [
            m(b, t, k),
            lengths(m, b, t),
            *biased(m, (c, 1, 3, 3), (c, c, 3, 3), (c, c * (((k - 1) // 2 - 1) // 2))),
        ],
        (2, 15, 11, 4),
    ).block("subsampled", 16, 1601, 80, 256, training=True),
    Sized(
        clipped_maps,
        lambda m, b, k, t: [
            m(b, k, t),
            lengths(m, b, t),
            weight(m, 32, 1, 41, 11),
            m(2, 32),
            weight(m, 32, 32, 21, 11),
            m(2, 32),
        ],
        (2, 17, 12),
    ).block("clipped maps", 16, 161, 801, training=True),
    Sized(
        label_paths,
        lambda m, b, t, c, k, n: [m(b, t, c), ids(m, k - 1, b, n), m(2, c), *biased(m, (k, c))],
        (2, 12, 6, 7, 4),
    ).block("label paths", 16, 500, 512, 5001, 80, training=True),
    Sized(
        pair_network,
        lambda m, b, t, u, c, h, k: [
            m(b, t, c),
            m(b, u + 1, h),
            ids(m, k, b, u),
            *biased(m, (h, c)),
            weight(m, h, h),
            *biased(m, (k, h)),
        ],
        (2, 5, 3, 6, 4, 7),
    ).block("pair network", 8, 125, 40, 512, 640, 1025, training=True),
    Sized(
        pooled_speakers,
        lambda m, b, c, t, o, k: [
            m(b, c, t),
            ids(m, k, b),
            *biased(m, (o * 2 // 3, 3 * c, 1)),
            m(2, o * 2 // 3),
            weight(m, c, o * 2 // 3, 1),
            m(2, 2 * c),
            weight(m, o, 2 * c),
            m(2, o),
            weight(m, k, o),
        ],
        (5, 4, 7, 6, 9),
    ).block("pooled speakers", 64, 1536, 301, 192, 5994, training=True),
    Sized(
        split_frames,
        lambda m, b, c, t: [
            m(b, c, t),
            weight(m, c, c, 1),
            m(2, c),
            m(7, c // 8, c // 8, 3) * (3 * c // 8) ** -0.5,
            m(7, c // 8),
            m(7, 2, c // 8),
            weight(m, c, c, 1),
            m(2, c),
            *biased(m, (c // 8, c, 1), (c, c // 8, 1)),
        ],
        (2, 64, 9),
    ).block("split frames", 64, 512, 301, training=True),
    MIXED.block("mixed dilations", 16, 64, 2048, training=True),
    MIXED.block("mixed dilations", 1, 256, 801),
    Sized(
        period_critic,
        lambda m, b, n, c: [
            m(b, n),
            m(b, n),
            *biased(m, (c, 1, 5, 1), (4 * c, c, 5, 1), (16 * c, 4 * c, 5, 1), (32 * c, 16 * c, 5, 1), (32 * c, 32 * c, 5, 1)),
            *biased(m, (1, 32 * c, 3, 1)),
        ],
        (1, 413, 2),
        SINGLE,
        tf32=True,
    ).block("period critic", 16, 8192, 32, training=True),
    Sized(
        scale_critic,
        lambda m, b, n, c: [
            m(2 * b, n),
            *biased(m, (c, 1, 15), (4 * c, 4, 41), (16 * c, 4, 41), (64 * c, 4, 41), (64 * c, 4, 41)),
            *biased(m, (64 * c, 64 * c, 5)),
            weight(m, 1, 64 * c, 3),
        ],
        (3, 2000, 4),
        SINGLE,
        tf32=True,
    ).block("scale critic", 16, 8192, 16, training=True),
    CODEC.block("codec encoder", 8, 24000, 32, training=True),
    CODEC.block("codec encoder", 1, 240007, 32),
    Sized(
        inverse_frames,
        lambda m, b, c, t, n: [
            m(b, c, t),
            *biased(m, (c, 1, 7)),
            m(2, c),
            *biased(m, (3 * c, c), (c, 3 * c)),
            m(c),
            m(2, c) / 2,
            *biased(m, (n + 2, c)),
            m(n).abs() + 0.5,
        ],
        (2, 6, 9, 16),
    ).block("inverse frames", 16, 512, 256, 1024, training=True),
    Sized(
        after_net,
        lambda m, b, k, t, c: [
            m(b, k, t),
            m(b, k, t),
            *(z for s in ((c, k, 5), *((c, c, 5),) * 3, (k, c, 5)) for z in (weight(m, *s), m(2, s[0]))),
        ],
        (2, 4, 7, 6),
    ).block("after net", 32, 80, 803, 512, training=True),
    Sized(
        located_steps,
        lambda m, b, q, n, c, f, a: [
            m(b, q, c),
            m(b, n, c),
            weight(m, a, c),
            weight(m, a, c),
            weight(m, f, 2, 31),
            weight(m, a, f),
            m(a),
        ],
        (2, 4, 7, 6, 3, 5),
        SINGLE,
    ).block("located steps", 48, 4, 161, 512, 32, 128, training=True),
    Sized(
        phoneme_block,
        lambda m, b, n, c, f: [
            m(b, n, c),
            lengths(m, b, n),
            m(b, n),
            *biased(m, (3 * c, c), (c, c)),
            m(2, c),
            *biased(m, (f, c, 9), (c, f, 1)),
            m(2, c),
            *biased(m, (c, c, 3)),
            m(2, c),
            *biased(m, (c, c, 3)),
            m(2, c),
            weight(m, 1, c),
        ],
        (2, 6, 8, 10),
    ).block("phoneme block", 32, 150, 256, 1024, training=True),
    Sized(
        posterior_waves,
        lambda m, b, k, t, c: [
            m(b, k, t),
            m(b, c, 1),
            m(b, c, t),
            m(b, 2 * c, t) / 2,
            *biased(m, (c, k, 1), (8 * c, c, 1)),
            m(4, 2 * c, c, 5) * (5 * c) ** -0.5,
            m(4, 2 * c),
            m(4, 2 * c, c, 1) * c**-0.5,
            m(4, 2 * c),
            weight(m, 2 * c, c, 1) / 4,
            m(2 * c) / 4,
        ],
        (2, 5, 6, 4),
        SINGLE,
    ).block("posterior waves", 16, 513, 401, 192, training=True),
    Sized(
        delayed_codes,
        lambda m, b, t, k, c: [ids(m, k, b, 4, t), m(4, k + 1, c), m(2, c), m(4, k, c) * c**-0.5],
        (2, 5, 7, 6),
    ).block("delayed codes", 8, 500, 2048, 1024, training=True),
    SEPARATED.block("separated", 8, 32000, 512, 16, 128, 512, training=True),
    SEPARATED.block("separated", 1, 64000, 256, 20, 256, 512),
    Sized(
        complex_encoder,
        lambda m, b, h, w: [
            m(b, 2, h, w),
            *(
                t
                for i, o in ((1, 16), (16, 32), (32, 64))
                for t in (weight(m, o, i, 5, 2), weight(m, o, i, 5, 2), m(2, 2 * o), m(1))
            ),
        ],
        (1, 16, 5),
    ).block("complex encoder", 16, 257, 401, training=True),
    Sized(compressed_spectra, lambda m, b, n, k: [m(b, n), m(b, n), m(k).abs() + 0.2], (2, 100, 16), SINGLE).block(
        "compressed spectra", 16, 64000, 512, training=True
    ),
    Sized(pitch_frames, pitch_inputs, (2, 1, 512), SINGLE, tf32=True).block("pitch frames", 512, 32, 512),
)
