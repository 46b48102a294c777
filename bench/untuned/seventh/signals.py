"""Blocks of sound and series: spectra, filters, codes, receivers, forecasts, prices."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, weight

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


def onset_peaks(spectra: Tensor) -> tuple[Tensor, Tensor]:
    """Spectral flux, a local median and mean as threshold, peaks that are largest within seven frames."""
    s = torch.log1p(spectra.abs() * 10)
    flux = F.relu(s[..., 1:] - F.max_pool2d(s[:, None], (3, 1), 1, (1, 0))[:, 0, :, :-1]).sum(1)
    windows = F.pad(flux, (8, 8), mode="reflect").unfold(-1, 17, 1)
    level = 0.7 * windows.median(-1).values + 0.3 * windows.mean(-1)
    top = F.max_pool1d(flux[:, None], 7, 1, 3)[:, 0]
    return (flux == top) & (flux > level + 0.1), flux - level


def pitch_classes(power: Tensor, filters: Tensor) -> Tensor:
    """A chromagram: bins to twelve pitch classes, normed by frame, smoothed over nine frames, a self-similarity's trace."""
    c = torch.einsum("bft,cf->bct", power.square(), filters.softmax(-1))
    c = c / c.amax(1, keepdim=True).clamp(min=1e-6)
    steps = sum((c > t).to(c.dtype) * 0.25 for t in (0.05, 0.1, 0.2, 0.4))
    smooth = F.conv1d(
        steps, torch.hann_window(11, device=c.device, dtype=c.dtype)[1:-1].expand(12, 1, 9) / 5, padding=4, groups=12
    )
    return F.normalize(smooth, dim=1)


def phase_iterations(size: Tensor, wave: Tensor) -> Tensor:
    """Griffin and Lim's fast version: two rounds of transforms and back, sizes kept, phases with momentum."""
    n = 2 * (size.shape[1] - 1)
    hop = n // 4
    window = torch.hann_window(n, device=size.device, dtype=size.dtype)
    last = torch.zeros((), device=size.device, dtype=size.dtype)
    x = wave
    mag = size.abs()
    for _ in range(2):
        spec = torch.stft(x, n, hop, window=window, return_complex=True)
        now = torch.view_as_real(spec)
        angles = now - 0.5 * last
        last = now
        angles = angles / (angles.square().sum(-1, keepdim=True) + 1e-9).sqrt()
        x = torch.istft(torch.view_as_complex(angles * mag[..., None]), n, hop, window=window, length=x.shape[-1])
    return x


def companded(wave: Tensor, table: Tensor, w: Tensor) -> Tensor:
    """Mu-law codes of a wave, embedded, a dilated pair of taps, the loss of the next code."""
    x = wave.tanh()
    y = torch.sign(x) * torch.log1p(255 * x.abs()) / math.log(256)
    code = ((y + 1) / 2 * 255 + 0.5).long().clamp(0, 255)
    h = table[code]
    h = torch.cat([F.pad(h, (0, 0, 2, 0))[:, :-2], h], -1)
    a, b = F.linear(h, w).chunk(2, -1)
    logits = (torch.tanh(a) * torch.sigmoid(b)) @ table.mT
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), code[:, 1:].flatten())


def filtered_noise(sizes: Tensor, noise: Tensor) -> Tensor:
    """DDSP: frames of noise filtered by their own zero-phase filters, windowed responses, overlapped and added."""
    b, t, _ = sizes.shape
    amp = 2 * torch.sigmoid(sizes) ** 2.3 + 1e-7
    response = torch.fft.irfft(torch.view_as_complex(torch.stack([amp, torch.zeros_like(amp)], -1).float()))
    n = response.shape[-1]
    response = response.roll(n // 2, -1) * torch.hann_window(n, device=sizes.device, dtype=response.dtype)
    frames = noise.view(b, t, -1)
    hop = frames.shape[-1]
    size = hop + n - 1
    spec = torch.fft.rfft(F.pad(frames.to(response.dtype), (0, size - hop))) * torch.fft.rfft(F.pad(response, (0, size - n)))
    y = torch.fft.irfft(spec, n=size)
    return F.fold(y.mT, (1, hop * (t - 1) + size), (1, size), stride=(1, hop))[:, 0, 0]


def compressor(x: Tensor, attack: Tensor, release: Tensor) -> Tensor:
    """A compressor: levels in decibels of blocks, a knee, gains followed with attack and release, interpolated."""
    b, n = x.shape
    hop = 64 if n > 640 else 3
    level = 10 * torch.log10(x.view(b, -1, hop).square().mean(-1) + 1e-6)
    over = level + 20
    reduce = torch.where(over <= -3, 0.0, torch.where(over >= 3, over * 0.75, (over + 3) ** 2 * 0.75 / 12))
    up, down = torch.sigmoid(attack), torch.sigmoid(release)
    g, found = torch.zeros_like(reduce[:, 0]), []
    for i in range(reduce.shape[1]):
        r = reduce[:, i]
        c = torch.where(r > g, up, down)
        g = c * g + (1 - c) * r
        found.append(g)
    gain = F.interpolate(torch.stack(found, 1)[:, None], size=n, mode="linear", align_corners=False)[:, 0]
    return x * 10 ** (-gain / 20)


def three_states(y: Tensor, rates: Tensor, season: Tensor) -> Tensor:
    """Holt and Winters for many series: level, trend and twelve seasons by a recurrence, the mean squared error."""
    a, b, c, phi = torch.sigmoid(rates)
    level, trend = y[0], y[1] - y[0]
    s = list(season.unbind(0))
    loss = torch.zeros_like(level)
    for t in range(len(y)):
        now = s[t % len(s)]
        loss = loss + (y[t] - (level + phi * trend + now)) ** 2
        old = level
        level = a * (y[t] - now) + (1 - a) * (level + phi * trend)
        trend = b * (level - old) + (1 - b) * phi * trend
        s[t % len(s)] = c * (y[t] - level) + (1 - c) * now
    return (loss / len(y)).mean()


def variate_tokens(x: Tensor, embed: Tensor, qkv: Tensor, out: Tensor, head: Tensor) -> Tensor:
    """iTransformer: series normed by their own statistics, attention between series, norms undone on forecasts."""
    mean = x.mean(1, keepdim=True).detach()
    std = (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    t = F.linear(((x - mean) / std).permute(0, 2, 1), embed)
    b, c, d = t.shape
    q, k, v = (z.view(b, c, 4, d // 4).transpose(1, 2) for z in F.linear(t, qkv).split(d, -1))
    a = torch.softmax(q @ k.transpose(-2, -1) / (d // 4) ** 0.5, -1) @ v
    t = F.layer_norm(t + F.linear(a.transpose(1, 2).reshape(b, c, d), out), (d,))
    return F.linear(t, head).permute(0, 2, 1) * std + mean


def outlier_windows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Hampel's filter: medians and deviations from them in windows of eleven, outliers replaced and counted."""
    w = F.pad(x[:, None], (5, 5), mode="replicate")[:, 0].unfold(1, 11, 1)
    middle = w.median(-1).values
    mad = (w - middle[..., None]).abs().median(-1).values
    bad = (x - middle).abs() > 3 * 1.4826 * mad
    return torch.where(bad, middle, x), bad.sum(1)


def uneven_periodogram(times: Tensor, y: Tensor, freqs: Tensor) -> Tensor:
    """Lomb and Scargle: sums of sines and cosines at each frequency with its own time offset."""
    w = 2 * math.pi * freqs.abs()[:, None]
    y = y - y.mean()
    wt = w * times[None].abs() * 10
    tau = torch.atan2(torch.sin(2 * wt).sum(1), torch.cos(2 * wt).sum(1)) / 2
    c, s = torch.cos(wt - tau[:, None]), torch.sin(wt - tau[:, None])
    return 0.5 * ((c @ y) ** 2 / (c * c).sum(1).clamp(min=1e-3) + (s @ y) ** 2 / (s * s).sum(1).clamp(min=1e-3))


def soft_demapping(re: Tensor, im: Tensor, channel: Tensor, levels: Tensor) -> Tensor:
    """A receiver: equalised symbols, squared distances to 64 points by axis, log-likelihood ratios of six bits to int8."""
    hr, hi = channel.unbind(-1)
    power = (hr * hr + hi * hi).clamp(min=1e-2)
    xr, xi = (re * hr + im * hi) / power, (im * hr - re * hi) / power
    found = []
    for x in (xr, xi):
        d = (x[..., None] - levels) ** 2 * power[..., None]
        for bit in range(3):
            ones = [i for i in range(8) if (i ^ (i >> 1)) >> bit & 1]
            zeros = [i for i in range(8) if i not in ones]
            found.append(d[..., ones].amin(-1) - d[..., zeros].amin(-1))
    return (torch.stack(found, -1) * 8).round().clamp(-127, 127).to(torch.int8)


def delays_of_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """GCC-PHAT: whitened cross-spectra of all pairs of microphones, correlations, the best delays and their sharpness."""
    n = x.shape[-1]
    spec = torch.fft.rfft(x * torch.hann_window(n, device=x.device, dtype=x.dtype), n=2 * n)
    c = x.shape[1]
    i, j = torch.triu_indices(c, c, 1, device=x.device)
    cross = spec[:, i] * spec[:, j].conj()
    cross = cross / (cross.abs() + 1e-6)
    r = torch.fft.irfft(cross)
    r = torch.cat([r[..., -40:], r[..., :41]], -1) if n > 80 else r
    top, at = r.max(-1)
    return at - r.shape[-1] // 2, top / (r.abs().mean(-1) + 1e-6)


def linear_prediction(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levinson and Durbin for each frame: autocorrelations, sixteen coefficients in a loop, log areas of reflections."""
    order = 16 if x.shape[-1] > 32 else 3
    n = x.shape[-1]
    y = x * torch.hamming_window(n, device=x.device, dtype=x.dtype)
    r = torch.stack([(y[..., : n - k] * y[..., k:]).sum(-1) for k in range(order + 1)], -1)
    error = r[..., 0] * 1.001 + 1e-3
    a = torch.zeros_like(r)
    a[..., 0] = 1
    ks = []
    for m in range(1, order + 1):
        k = -(a[..., :m] * r[..., 1 : m + 1].flip(-1)).sum(-1) / error
        new = a.clone()
        new[..., 1 : m + 1] += k[..., None] * a[..., :m].flip(-1)
        a = new
        error = error * (1 - k * k).clamp(min=1e-4)
        ks.append(k)
    k = torch.stack(ks, -1).clamp(-0.99, 0.99)
    return a, torch.log((1 + k) / (1 - k))


def smoothed_slopes(x: Tensor, coeffs: Tensor) -> Tensor:
    """Savitzky and Golay: values, slopes and curvatures by three filters on windows of 21, turning points marked."""
    w = F.pad(x, (10, 10)).unfold(-1, 21, 1)
    y = torch.einsum("bnk,ck->cbn", w, coeffs)
    turn = (y[1, :, 1:] * y[1, :, :-1] < 0) & (y[2, :, 1:] < 0)
    return torch.cat([y[0, :, 1:] * turn, y[0, :, 1:] - x[:, 1:]], 1)


def decimated(x: Tensor, taps: Tensor) -> Tensor:
    """A polyphase filter bank: strided windows, taps folded over eight branches, a transform over the branches."""
    m = 8
    k = taps.shape[0] // m
    y = x.unfold(-1, taps.shape[0], m).unflatten(-1, (k, m)) * taps.view(k, m)
    spec = torch.fft.fft(y.sum(-2).float() if x.dtype == torch.bfloat16 else y.sum(-2), dim=-1)
    return 10 * torch.log10(spec.real.square() + spec.imag.square() + 1e-6)


def implied_volatility(price: Tensor, strike: Tensor, spot: Tensor, years: Tensor) -> Tensor:
    """Black and Scholes inverted: eight safeguarded Newton steps, each with two normal distributions and a vega."""
    s, k, t = F.softplus(spot) + 0.5, F.softplus(strike) + 0.5, F.softplus(years) + 0.5
    target = torch.maximum(s - k, torch.zeros_like(s)) + torch.sigmoid(price) * 0.2 * s
    low, high = torch.full_like(s, 1e-3), torch.full_like(s, 5.0)
    vol = torch.full_like(s, 0.5)
    for _ in range(8):
        root = vol * t.sqrt()
        d1 = (torch.log(s / k) + 0.5 * vol**2 * t) / root
        cdf1, cdf2 = 0.5 * torch.erfc(-d1 / 2**0.5), 0.5 * torch.erfc(-(d1 - root) / 2**0.5)
        value = s * cdf1 - k * cdf2
        vega = s * torch.exp(-0.5 * d1 * d1) * 0.39894 * t.sqrt()
        high, low = torch.where(value > target, vol, high), torch.where(value > target, low, vol)
        new = vol - (value - target) / vega.clamp(min=1e-4)
        vol = torch.minimum(torch.maximum(new, low), high)
    return vol


def barrier_paths(z: Tensor, vol: Tensor, barrier: Tensor) -> Tensor:
    """Down-and-out calls: paths by cumulative sums, survival between dates by the bridge's law, a payoff's mean."""
    steps = z.shape[0]
    v = F.softplus(vol)[None, :, None] * 0.3 + 0.05
    dt = 1 / steps
    logs = torch.cumsum(-0.5 * v**2 * dt + v * dt**0.5 * z[:, None], 0)
    b = -F.softplus(barrier)[None, :, None] * 0.5 - 0.05
    prev = F.pad(logs[:-1], (0, 0, 0, 0, 1, 0))
    gap = (logs - b).clamp(min=0) * (prev - b).clamp(min=0)
    alive = torch.log1p(-torch.exp(-2 * gap / (v**2 * dt)).clamp(max=1 - 1e-6)).sum(0).exp()
    return (F.relu(logs[-1].exp() - 1) * alive).mean(-1)


def smiles(forward: Tensor, strike: Tensor, params: Tensor) -> Tensor:
    """SABR: Hagan's formula with its limit near the money, fitted to quotes by squares."""
    alpha, beta, rho, nu = F.softplus(params[0]), torch.sigmoid(params[1]), torch.tanh(params[2]) * 0.4, F.softplus(params[3])
    f, k = F.softplus(forward)[:, None] + 0.2, F.softplus(strike) + 0.2
    alpha, beta, rho, nu = (p[:, None] for p in (alpha, beta, rho, nu))
    log = torch.log(f / k)
    mid = (f * k) ** ((1 - beta) / 2)
    z = nu / alpha * mid * log
    small = z.abs() < 1e-2
    safe = torch.where(small, torch.ones_like(z), z)
    x = torch.log(((1 - 2 * rho * safe + safe * safe).sqrt() + safe - rho) / (1 - rho))
    ratio = torch.where(small, 1 - 0.5 * rho * z, safe / x)
    d = 1 + (1 - beta) ** 2 / 24 * log**2 + (1 - beta) ** 4 / 1920 * log**4
    time = 1 + ((1 - beta) ** 2 / 24 * alpha**2 / mid**2 + 0.25 * rho * beta * nu * alpha / mid + (2 - 3 * rho**2) / 24 * nu**2)
    return ((alpha / (mid * d) * ratio * time - 0.3) ** 2).mean()


def bond_curve(rates: Tensor, times: Tensor, coupon: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forwards to discounts, read by linear interpolation at each bond's dates; prices, durations and convexities."""
    disc = torch.exp(-torch.cumsum(F.softplus(rates) * 0.01, 0))
    grid = torch.arange(1, len(rates) + 1, device=rates.device, dtype=rates.dtype)
    t = (times.abs().cumsum(1) * 0.5 + 1).clamp(max=len(rates) - 0.5)
    hi = torch.bucketize(t, grid).clamp(1, len(rates) - 1)
    lo = hi - 1
    w = (t - grid[lo]) / (grid[hi] - grid[lo])
    df = torch.exp(torch.lerp(disc.log()[lo], disc.log()[hi], w))
    cash = torch.sigmoid(coupon)[:, None] * 0.1 + F.one_hot(torch.tensor(t.shape[1] - 1, device=t.device), t.shape[1])
    pv = cash * df
    price = pv.sum(1)
    return price, (pv * t).sum(1) / price, (pv * t * t).sum(1) / price


def expected_shortfall(weights: Tensor, scenarios: Tensor, prices: Tensor) -> Tensor:
    """Portfolios' losses in all scenarios, the mean of the worst fortieth, a penalty of turnover."""
    w = weights.softmax(-1)
    loss = -(w @ (scenarios * 0.02).exp().sub(1).mT)
    k = max(1, loss.shape[1] // 40)
    worst = loss.topk(k, dim=1).values
    return worst.mean() + 1e-3 * (w - prices.softmax(-1)).abs().sum(1).mean()


FILTERED = Sized(filtered_noise, lambda m, b, t, k, h: [m(b, t, k), m(b, t * h)], (2, 3, 5, 6), SINGLE)
VARIATES = Sized(
    variate_tokens,
    lambda m, b, t, c, d, p: [m(b, t, c), weight(m, d, t), weight(m, 3 * d, d), weight(m, d, d), weight(m, p, d)],
    (2, 9, 5, 8, 4),
)
SLOPES = Sized(smoothed_slopes, lambda m, b, n: [m(b, n), weight(m, 3, 21)], (2, 13), SINGLE)
BLOCKS: tuple[Block, ...] = (
    Sized(onset_peaks, lambda m, b, f, t: [m(b, f, t)], (2, 5, 30), SINGLE).block("onset peaks", 16, 96, 1501),
    Sized(pitch_classes, lambda m, b, f, t: [m(b, f, t), m(12, f)], (2, 9, 15), SINGLE).block("pitch classes", 8, 1025, 801),
    Sized(phase_iterations, lambda m, b, k, t: [m(b, k // 2 + 1, t), m(b, k // 4 * (t - 1))], (2, 16, 9), SINGLE).block(
        "phase iterations", 8, 1024, 400
    ),
    Sized(companded, lambda m, b, n, d: [m(b, n), weight(m, 256, d), weight(m, 2 * d, 2 * d)], (2, 9, 6)).block(
        "companded", 8, 4001, 64, training=True
    ),
    *FILTERED.both("filtered noise", 8, 250, 65, 64),
    Sized(compressor, lambda m, b, n: [m(b, n), m(1) + 1, m(1) + 3], (2, 27), SINGLE).block("compressor", 64, 12800),
    Sized(three_states, lambda m, t, n, s: [m(t, n), m(4, n), m(s, n)], (7, 5, 3), SINGLE).block(
        "three states", 72, 30011, 12, training=True
    ),
    *VARIATES.both("variate tokens", 32, 96, 321, 256, 96),
    Sized(outlier_windows, lambda m, b, n: [m(b, n)], (2, 30), SINGLE).block("outlier windows", 16, 30001),
    Sized(uneven_periodogram, lambda m, n, k: [m(n), m(n), m(k)], (20, 7), SINGLE).block("uneven periodogram", 3001, 4003),
    Sized(soft_demapping, lambda m, b, n: [m(b, n), m(b, n), m(b, n, 2), m(8)], (2, 9), SINGLE).block(
        "soft demapping", 14, 100003
    ),
    Sized(delays_of_pairs, lambda m, b, c, n: [m(b, c, n)], (2, 3, 16), SINGLE).block("delays of pairs", 64, 6, 2000),
    Sized(linear_prediction, lambda m, b, n: [m(b, n)], (3, 20), SINGLE).block("linear prediction", 8001, 480),
    *SLOPES.both("smoothed slopes", 64, 20001),
    Sized(decimated, lambda m, b, n, k: [m(b, n), m(k)], (2, 60, 16), SINGLE).block("decimated", 16, 262149, 96),
    Sized(implied_volatility, lambda m, n: [m(n), m(n), m(n), m(n)], (30,), SINGLE).block("implied volatility", 1000003),
    Sized(barrier_paths, lambda m, t, n, k: [m(t, n), m(k), m(k)], (5, 9, 3), SINGLE).block(
        "barrier paths", 52, 8001, 12, training=True
    ),
    Sized(smiles, lambda m, n, k: [m(n), m(n, k), m(4, n)], (5, 4), SINGLE).block("smiles", 20011, 21, training=True),
    Sized(bond_curve, lambda m, n, k, d: [m(n), m(k, d), m(k)], (20, 5, 4), SINGLE).block("bond curve", 61, 30011, 40),
    Sized(expected_shortfall, lambda m, b, n, d: [m(b, d), m(n, d), m(b, d)], (3, 50, 4), SINGLE, tf32=True).block(
        "expected shortfall", 256, 10007, 100, training=True
    ),
)
