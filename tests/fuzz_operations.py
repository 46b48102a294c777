"""The operations of the program fuzzer: each gives the statements that define one name. `OPERATIONS` and `RAISING` list them.

What jumps (comparisons, rounding, positions of extremes) may stand anywhere: the comparison finds out which results depend on
the last bits (tests/fuzz_oracle.py). Left out is only what eager itself leaves undefined: conversions of floats to integers
that cannot hold them, writes to one element twice, shifts by more bits than there are.
"""

from __future__ import annotations

import math

from fuzz_program import DTYPE_NAMES, FLOATS, INTEGERS, Dropped, Grower, Operation, kind_of

# ---- pointwise ------------------------------------------------------------------------------------------------------

UNARY = (
    "torch.tanh({a})", "torch.sigmoid({a})", "torch.exp(-{a}.abs())", "torch.sin({a})", "torch.cos({a})", "{a}.abs()", "-{a}",
    "torch.relu({a})", "torch.sqrt({a}.abs() + 0.1)", "torch.log1p({a}.abs())", "{a}.square() * 0.1", "1 / ({a}.abs() + 1)",
    "F.gelu({a})", "F.gelu({a}, approximate='tanh')", "F.silu({a})", "torch.erf({a})", "{a}.clamp(-1, 1.5)", "{a} * {number}",
    "{a} + {number}", "{number} - {a}", "torch.rsqrt({a}.abs() + 0.5)", "torch.atan({a})", "F.softplus({a})",
    "F.leaky_relu({a})", "F.elu({a})", "F.hardtanh({a})", "F.hardswish({a})", "F.hardsigmoid({a})", "F.mish({a})",
    "F.selu({a})",
    "F.logsigmoid({a})", "F.softsign({a})", "F.tanhshrink({a})", "F.relu6({a})", "F.hardshrink({a}, 0.3)",
    "F.threshold({a}, 0.1, 2.0)",
    "torch.expm1({a}.clamp(max=3))", "torch.log2({a}.abs() + 0.5)", "torch.sinh({a}.clamp(-3, 3))", "torch.asinh({a})",
    "torch.reciprocal({a}.abs() + 0.5)", "({a}.abs() + 0.1) ** 1.5", "{a} ** 3 * 0.1", "2.0 ** {a}.clamp(-4, 4)",
    "torch.acos(torch.tanh({a}))",
    "torch.nan_to_num({a}, nan=0.5, posinf=3.0, neginf=-3.0)", "torch.logit(torch.sigmoid({a}), eps=0.01)", "F.celu({a}, 0.7)",
    "torch.sinc({a})", "torch.deg2rad({a})", "torch.exp2(-{a}.abs())", "torch.erfc({a})", "torch.cosh({a}.clamp(-3, 3))",
)  # fmt: skip
JUMPS = ("torch.floor({a})", "torch.ceil({a})", "torch.trunc({a} * 3)", "torch.round({a} * 2)", "torch.sign({a})",
"torch.frac({a})",
         "torch.round({a}, decimals=1)", "{a} // 0.7", "{a} % 0.7", "torch.fmod({a}, 0.9)",
         "torch.heaviside({a}, {a} * 0)")  # fmt: skip


def unary(g: Grower, name: str) -> str:
    """Eager's gradient of hardsigmoid is a sixth in float32, for float64 as well."""
    form = g.rng.choice(UNARY)
    if g.gradients and "hardsigmoid" in form and "f64" in g.floats:
        raise Dropped
    return f"{name} = " + form.format(a=g.pick("float"), number=g.number())


def jump(g: Grower, name: str) -> str:
    return f"{name} = " + g.rng.choice(JUMPS).format(a=g.pick("float"))


def integer_unary(g: Grower, name: str) -> str:
    forms = (
        "-{a}", "{a}.abs()", "~{a}", "{a} % 7", "{a} % -5", "{a} // 3", "{a} // -4", "{a} * 3 - 1", "{a} & 5", "{a} << 1",
        "{a} >> 2",
        "{a} ^ 3", "{a}.sign()", "{a}.clamp(-3, 11)", "torch.fmod({a}, 5)", "torch.div({a}, 3, rounding_mode='trunc')",
        "{a} * {a}",
        "{a} / 4", "{a} * 0.5", "1 - {a}", "{a}.square()", "torch.relu({a})", "{a}.bitwise_not()", "{a}.clamp(min=0)",
        "{a} ** 2",
        "torch.sqrt({a}.abs())", "torch.tanh({a})", "torch.remainder({a}, 3)", "{a}.float().to({t})",
    )  # fmt: skip
    a = g.pick("int")
    if g.special and kind_of(g[a]) == "int":  # a float may not hold the extremes of an integer
        forms = forms[:-1]
    return f"{name} = " + g.rng.choice(forms).format(a=a, t=DTYPE_NAMES[g[a].dtype])


def binary(g: Grower, name: str) -> str:
    a = g.pick("float")
    b = g.partner(a, "float", "float", "int", "bool") if g.rng.random() < 0.3 else g.partner(a, "float")
    forms = (
        "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "torch.fmax({a}, {b})",
        "{a} / ({b}.abs() + 1)", "torch.atan2({a}, {b}.abs() + 0.5)", "torch.hypot({a}, {b} + 3)", "torch.lerp({a}, {b}, 0.3)",
        "torch.addcmul({a}, {b}, {b}, value=0.3)", "torch.copysign({a}, {b})", "torch.add({a}, {b}, alpha=2)",
        "torch.rsub({a}, {b})",
        "torch.logaddexp({a}, {b})", "({a}.abs() + 0.2) ** {b}.clamp(-2, 2)", "torch.xlogy({a}, {b}.abs() + 0.3)",
        "torch.addcdiv({a}, {b}, {b}.abs() + 1)", "torch.ldexp({a}, {b}.clamp(-2, 2))",
        "F.huber_loss({a}, {b}, reduction='none')",
        "torch.fmin({a}, {b})", "{b} - {a} * {b}", "torch.clamp({a}, {b} - 1, {b} + 1)", "F.prelu({a}, {b}.reshape(-1)[:1])",
    )  # fmt: skip
    return f"{name} = " + g.rng.choice(forms).format(a=a, b=b)


def special_binary(g: Grower, name: str) -> str:
    a = g.pick("float")
    b = g.partner(a, "float")
    forms = ("{a} / {b}", "torch.remainder({a}, {b})", "torch.fmod({a}, {b})", "torch.log({a})", "torch.sqrt({a})",
    "{a} ** {b}", "torch.nextafter({a}, {b})",
             "1 / {a}", "torch.rsqrt({a})", "torch.acos({a})", "torch.exp({a} * 40)", "torch.atanh({a})",
             "torch.xlogy({a}, {b})")  # fmt: skip
    if not g.special:
        raise Dropped
    return f"{name} = " + g.rng.choice(forms).format(a=a, b=b)


def integer_binary(g: Grower, name: str) -> str:
    a = g.pick("int")
    b = g.partner(a, "int", "int", "bool")
    forms = (
        "{a} + {b}", "{a} - {b}" if kind_of(g[b]) == "int" else "{a} + {b}", "{a} * {b}", "torch.maximum({a}, {b})",
        "{a} & {b}", "{a} | {b}", "{a} ^ {b}",
        "{a} // (({b} & 3) + 1)", "{a} % (({b} & 7) + 1)", "torch.fmod({a}, ({b} & 3) + 1)", "{a} << ({b} & 3)",
        "{a} >> ({b} & 5)",
        "torch.div({a}, ({b} & 3) + 2, rounding_mode='floor')", "{a} / (({b} & 3) + 1)", "torch.minimum({a}, {b})",
        "torch.gcd({a}, {b})",
        "({a} // (({b} | 1) & 7))", "torch.add({a}, {b}, alpha=3)",
    )  # fmt: skip
    return f"{name} = " + g.rng.choice(forms).format(a=a, b=b)


def compare(g: Grower, name: str) -> str:
    a = g.pick("any")
    sign = g.rng.choice((">", "<=", "==", "!=", "<", ">="))
    if g.rng.random() < 0.5:
        return f"{name} = {a} {sign} {g.partner(a, 'float', 'int', 'bool')}"
    return f"{name} = {a} {sign} {g.rng.choice((0, 1, 2, 0.3, -1.5))}"


def scalar(g: Grower, name: str) -> str:
    """Python numbers, with their rules of promotion: some do not fit the tensor's type."""
    a = g.pick("int", "bool")
    forms = (
        "{a} + 300", "{a} > 300", "{a} == -1", "{a} + 1.5", "{a} * True", "{a} % 0.7", "{a} // 0.5", "{a} * 2", "{a} + 1",
        "2 - {a}.long()",
        "{a} != 1", "{a} / 3", "{a}.float() - 0.5", "{a} >= -1.5", "torch.where({a} > 0, {a}, -1)", "{a}.clamp(-1.5, 2.5)",
        "3 // ({a}.abs() % 5 + 1)",
        "{a} * 100000", "torch.maximum({a}, torch.tensor(3, device=D))", "{a} + torch.tensor(2.5, dtype=f64, device=D)",
        "{a} ** 3", "2 ** ({a} % 5)",
        "{a}.to(f32) / {a}.shape[0]", "{a} < {a}.shape[-1]", "torch.full_like({a}, 1.5, dtype=f32)",
        "{a}.masked_fill({a} > 1, 7)",
    )  # fmt: skip
    return f"{name} = " + g.rng.choice(forms).format(a=a)


def rare(g: Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    d = g.dim(a)
    b = g.partner(a, "float")
    row = f"{a}.reshape(-1, {a}.shape[-1])"
    forms = (
        "torch.lerp({a}, {b}, {b}.sigmoid())", "torch.renorm({row}, 2, 0, 1.0)", "torch.trace({row})",
        "torch.cov({row}) * 0.1", "torch.addmv({row}[:, 0], {row}, {row}[0], alpha=0.1)",
        "{a}.index_reduce({d}, torch.zeros(1, dtype=i64, device=D), {a}.narrow({d}, 0, 1), 'amax')",
        "torch.vander({row}[0].tanh())", "torch.trapezoid({a}, dim={d})",
        "torch.frexp({a})[0]", "torch.hypot({a}, {b})", "torch.polygamma(1, {a}.abs() + 1)", "torch.special.i0e({a})",
        "torch.special.erfcx({a}.abs())", "torch.lgamma({a}.abs() + 0.5)",
        "torch.digamma({a}.abs() + 0.5)", "torch.special.ndtri({a}.sigmoid())", "torch.erfinv({a}.tanh() * 0.9)",
        "F.pairwise_distance({row}, {row}.flip(0))", "torch.addr({row}, {row}[:, 0], {row}[0], alpha=0.1)",
        "torch.cross({row}[:, :3], {row}[:, :3].flip(0), dim=1)", "{a}.view({bits}).bitwise_and(-256).view({own})",
        "torch.cumulative_trapezoid({a}, dim={d})", "{a}.std({d}, correction=0)",
        "F.grid_sample({row}[None, None], torch.tanh({row}[:2, :2].reshape(1, 1, 2, 2)), align_corners=False)",
        "F.upsample({row}[None], scale_factor=2.5)", "torch.bucketize({a}.abs(), {row}[0].abs().sort()[0])",
        "torch.clamp({a}, min={b})", "torch.quantile({a}.to({own}), 0.5, dim={d})", "torch.histc({a}, 5, -2, 2)",
        "{a}.sum({d}).unsqueeze({d}).expand({a}.shape)",
        "torch.softmax({row}.masked_fill(torch.ones_like({row}, dtype=boolean).triu(1), float('-inf')), -1)",
        "({row} - {row}.mean(0)) / ({row}.var(0, correction=0) + 0.1).sqrt() * {row}[0]",
        "torch.where({a} > {b}, {a}, {b}).sum({d}) * 0.1", "{a}.unfold({d}, 1, 1).sum(-1)",
    )  # fmt: skip
    own = DTYPE_NAMES[g[a].dtype]
    bits = {"f32": "i32", "f64": "i64"}.get(own, "i16")
    return f"{name} = " + g.rng.choice(forms).format(a=a, b=b, d=d, row=row, own=own, bits=bits)


def logic(g: Grower, name: str) -> str:
    a = g.pick("bool")
    b = g.partner(a, "bool")
    return f"{name} = " + g.rng.choice(
        (f"~{a}", f"{a} & {b}", f"{a} | {b}", f"{a} ^ {b}", f"torch.logical_xor({a}, {b})", f"{a}.logical_not()", f"{a} * {b}",
         f"{a} + {b}", f"torch.logical_and({a}, {g.pick('any')})")
    )  # fmt: skip


def classify(g: Grower, name: str) -> str:
    a = g.pick("float")
    forms = ("torch.isnan({a})", "torch.isinf({a})", "torch.isfinite({a})", "torch.signbit({a})", "torch.isposinf({a})",
             "torch.isclose({a}, {a} + 0.1, equal_nan=True)", "{a}.bool()", "torch.logical_not({a})")  # fmt: skip
    return f"{name} = " + g.rng.choice(forms).format(a=a)


def select(g: Grower, name: str) -> str:
    c = g.pick("bool")
    a = g.partner(c, "float", "int")
    b = g.partner(a, kind_of(g[a]))
    return f"{name} = " + g.rng.choice(
        (f"torch.where({c}, {a}, {b})", f"torch.where({c}, {a}, 2)", f"{a}.masked_fill({c}, 3)", f"torch.where({c}, 0.5, {a})",
         f"{a} * {c}", f"torch.where({c}, {a}, {g.partner(a, 'float', 'int', 'bool')})",
         f"torch.where({c}, 1.0, 0.0).to({DTYPE_NAMES[g[a].dtype]})")
    )  # fmt: skip


def cast(g: Grower, name: str) -> str:
    """A conversion copies, also to the type that there was: where every float is float64 there must be the same copies."""
    a = g.pick("any")
    t = g[a]
    if t.dtype.is_floating_point and g.rng.random() < 0.35 and not g.gradients:
        to = g.rng.choice(list(INTEGERS))
        low = 0 if to == "u8" else -100
        return f"{name} = torch.nan_to_num({a}, nan=1.0).clamp({low}, 100).to({to})"
    to = g.rng.choice((*FLOATS, *FLOATS, *INTEGERS, "boolean") if not t.dtype.is_floating_point else tuple(FLOATS))
    return f"{name} = {a}.to({to}, copy=True)"


def same_type(g: Grower, name: str) -> str:
    a = g.pick("any")
    own = DTYPE_NAMES[g[a].dtype]
    return f"{name} = " + g.rng.choice(
        (f"{a}.to({own})", f"{a}.contiguous()", f"{a}.clone()", f"{a}.detach()" if not g.gradients else f"{a}.clone()")
    )


OTHER_SIGN = {"u8": "i8", "i8": "u8"}


def bits(g: Grower, name: str) -> str:
    a = g.pick("int")
    own = DTYPE_NAMES[g[a].dtype]
    return f"{name} = {a}.view({OTHER_SIGN.get(own, own)})"


# ---- reductions, scans, norms ---------------------------------------------------------------------------------------


def _dims(g: Grower, a: str) -> str:
    """The arguments of a reduction: dimensions, or none, and keepdim."""
    t = g[a]
    dims = sorted(g.rng.sample(range(t.dim()), g.rng.randint(1, min(2, t.dim()))))
    where = (
        ""
        if g.rng.random() < 0.15
        else f"{dims[0] - (t.dim() if g.rng.random() < 0.3 else 0)}"
        if len(dims) == 1
        else f"{dims}"
    )
    return where + (", keepdim=True" if where and g.rng.random() < 0.5 else "")


def reduction(g: Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    d, where = g.dim(a), _dims(g, a)
    full = where if where else f"{list(range(g[a].dim()))}"
    return f"{name} = " + g.rng.choice(
        (
            f"{a}.sum({where}) * 0.1", f"{a}.mean({where})", f"{a}.amax({where})", f"{a}.amin({where})",
            f"torch.logsumexp({a}, {full})",
            f"torch.tanh({a}).prod({d})", f"torch.var({a}, {full}, correction=0)" if "keep" not in full else f"{a}.std({d})",
            f"torch.linalg.vector_norm({a}, 2, {full})", f"{a}.nansum({where})", f"{a}.norm(dim={d})", f"{a}.max({d})[0]",
            f"{a}.min({d}, keepdim=True)[0]",
            f"{a}.sum({where or d}, dtype=f64)" if where else f"{a}.sum(dtype=f64)",
            f"torch.linalg.vector_norm({a}, 1, {full})", f"{a}.std()",
            f"torch.var_mean({a}, {d}, correction=0)[0]", f"{a}.abs().amax({where})", f"torch.aminmax({a}, dim={d})[1]",
            f"{a}.sum({d}).sum()", f"{a}.sum(-1).mean()",
            f"({a} * {a}).sum({where}) * 0.1", f"torch.linalg.vector_norm({a}, float('inf'), {full})", f"{a}.nanmean({where})",
        )
    )  # fmt: skip


def integer_reduction(g: Grower, name: str) -> str:
    a = g.pick("int", "bool", rank=1)
    d, where = g.dim(a), _dims(g, a)
    if kind_of(g[a]) == "bool":
        return f"{name} = " + g.rng.choice(
            (
                f"{a}.sum({where})",
                f"{a}.any({where})",
                f"{a}.all({where})",
                f"{a}.amax({where})",
                f"torch.count_nonzero({a}, {d})",
                f"{a}.cumsum({d})",
            )
        )
    return f"{name} = " + g.rng.choice(
        (f"{a}.sum({where})", f"{a}.amax({where})", f"{a}.amin({where})", f"{a}.prod({d})", f"{a}.any({where})",
        f"torch.count_nonzero({a}, {d})",
         f"{a}.max({d})[0]", f"{a}.sum({d}, dtype=i32)", f"{a}.float().mean({where})", f"{a}.all({where})", f"{a}.max()",
         f"{a}.sum({where or d}, dtype=f32)")
    )  # fmt: skip


def positions(g: Grower, name: str) -> str:
    a = g.pick("float", "int", rank=1)
    d = g.filled_dim(a)
    keep = g.rng.choice(("", ", keepdim=True"))
    return f"{name} = " + g.rng.choice(
        (f"{a}.argmax({d}{keep})", f"{a}.argmin({d}{keep})", f"{a}.argmax()",
        f"{a}.max({d}{keep})[1]" if kind_of(g[a]) == "float" else f"{a}.argmin()",
         f"{a}.argsort({d}, stable=True)", f"{a}.sort({d}, stable=True)[1]", f"{a}.cummax({d})[1]")
    )  # fmt: skip


def ordered(g: Grower, name: str) -> str:
    a = g.pick("float", "int", rank=1)
    d = g.filled_dim(a)
    k = g.rng.randint(1, g[a].shape[d])
    return f"{name} = " + g.rng.choice(
        (f"{a}.sort({d})[0]", f"{a}.sort({d}, descending=True)[0]", f"{a}.topk({k}, {d})[0]", f"{a}.kthvalue({k}, {d})[0]",
        f"{a}.median({d})[0]", f"{a}.median()",
         f"{a}.topk({k}, {d}, largest=False)[0]", f"{a}.msort()")
    )  # fmt: skip


def search(g: Grower, name: str) -> str:
    a = g.pick("float", "int", rank=1)
    b = g.partner(a, "float", "int")
    right = g.rng.choice(("", ", right=True", ", out_int32=True"))
    own = DTYPE_NAMES[g[b].dtype]
    line = (
        f"{a}.reshape(-1).sort()[0]"
        if g.rng.random() < 0.7
        else f"torch.arange({0 if own == 'u8' else -3}, 6, device=D).to({own})"
    )
    return f"{name} = " + g.rng.choice((f"torch.searchsorted({line}, {b}{right})", f"torch.bucketize({b}, {line}{right})"))


def scan(g: Grower, name: str) -> str:
    a = g.pick("float", "int", rank=1)
    d = g.dim(a)
    if kind_of(g[a]) == "int":
        return f"{name} = " + g.rng.choice(
            (f"{a}.cumsum({d})", f"{a}.cummax({d})[0]", f"{a}.cumprod({d}) % 100", f"{a}.diff(dim={d})")
        )
    return f"{name} = " + g.rng.choice(
        (f"{a}.cumsum({d}) * 0.1", f"torch.tanh({a}).cumprod({d})", f"{a}.cummax({d})[0]", f"torch.logcumsumexp({a}, {d})",
        f"{a}.cummin({d})[0]",
         f"{a}.diff(dim={d})", f"{a}.flip({d}).cumsum({d}).flip({d}) * 0.1")
    )  # fmt: skip


def normalise(g: Grower, name: str) -> str:
    a = g.pick("float", rank=1)
    d = g.dim(a)
    return f"{name} = " + g.rng.choice(
        (
            f"{a}.softmax({d})", f"{a}.log_softmax({d})", f"F.layer_norm({a}, {a}.shape[{d}:], eps=0.1)",
            f"{a} - {a}.mean({d}, keepdim=True)",
            f"{a} / ({a}.abs().sum({d}, keepdim=True) + 1)", f"F.rms_norm({a}, {a}.shape[-1:], eps=0.1)",
            f"F.normalize({a}, dim={d}, eps=0.1)",
            f"{a}.softmax({d}, dtype=f32)", f"F.softmin({a}, {d})",
            f"F.group_norm({a}.reshape(1, {a}.shape[0], -1), 1, eps=0.1)",
            f"F.batch_norm({a}.reshape({a}.shape[0], 1, -1), None, None, training=True, eps=0.1)",
            f"F.instance_norm({a}.reshape(1, {a}.shape[0], -1), eps=0.1)",
            f"F.layer_norm({a}, {a}.shape[-1:], {a}.reshape(-1)[:{a}.shape[-1]], eps=0.1)",
            f"F.local_response_norm({a}.reshape(1, {a}.shape[0], -1), 3)",
            f"F.cosine_similarity({a}, {a}.flip(0), {d}, eps=0.1)", f"{a} / {a}.amax({d}, keepdim=True).abs().clamp(min=0.5)",
            f"F.glu({a}, {d})",
        )
    )  # fmt: skip


def loss(g: Grower, name: str) -> str:
    a = g.pick("float", rank=2, most_rank=2)
    n, c = g[a].shape
    labels = g.add_input(f"randint({g.data_seed()}, 0, {c}, {n}).to(D)")
    how = g.rng.choice(("mean", "sum", "none"))
    return f"{name} = " + g.rng.choice(
        (f"F.cross_entropy({a}, {labels}, reduction='{how}') * 0.1",
        f"F.nll_loss({a}, {labels}, ignore_index=0, reduction='{how}') * 0.1",
        f"F.mse_loss({a}, {a}.flip(0), reduction='{how}') * 0.1",
         f"F.binary_cross_entropy_with_logits({a}, torch.sigmoid({a}), reduction='{how}') * 0.1",
         f"F.smooth_l1_loss({a}, {a}.flip(0), reduction='{how}') * 0.1",
         f"F.cross_entropy({a}, {labels}, label_smoothing=0.1)",
         f"F.kl_div({a}.log_softmax(-1), {a}.softmax(-1), reduction='{how}') * 0.1",
         f"F.l1_loss({a}, {a}.flip(1), reduction='{how}') * 0.1",
         f"F.one_hot({labels}, {c})", f"F.multi_margin_loss({a}, {labels}) * 0.1", f"F.soft_margin_loss({a}, {a}.sign())")
    )  # fmt: skip


# ---- views and joins ------------------------------------------------------------------------------------------------


def view(g: Grower, name: str) -> str:
    a = g.pick("any", rank=1)
    t, rng = g[a], g.rng
    d, e = g.dim(a), g.dim(a)
    n = t.shape[d]
    start = rng.randrange(n) if n else 0
    part = rng.randint(1, max(1, n))
    return f"{name} = " + rng.choice(
        (
            f"{a}.transpose({d}, {e})", f"{a}.reshape({_factors(g, t.numel())})", f"{a}.unsqueeze({d})",
            f"{a}.narrow({d}, {start}, {n - start})",
            f"{a}.select({d}, {start})", f"{a}[{':, ' * d}{start}::{rng.choice((1, 2, 3))}]", f"{a}.reshape(-1)",
            f"{a}.squeeze()",
            f"{a}.unsqueeze(0).expand({rng.choice((2, 3))}, {', '.join(['-1'] * t.dim())})", f"{a}.chunk(2, {d})[-1]",
            f"{a}.diagonal(0, {d}, {e})",
            f"{a}.unfold({d}, {max(1, min(2, n))}, 1)", f"{a}.movedim({d}, {e})", f"{a}.view({_factors(g, t.numel())})",
            f"{a}.flatten({min(d, e)}, {max(d, e)})",
            f"{a}.split({part}, {d})[0]", f"{a}.unbind({d})[{start}]", f"{a}.T" if t.dim() < 3 else f"{a}.mT", f"{a}[None]",
            f"{a}[..., None]", f"{a}[-1:]",
            f"{a}.view_as({a})", f"{a}.unflatten({d}, (1, -1))", f"{a}[{':, ' * d}:{n - 1}]" if n > 1 else f"{a}[:]",
            f"{a}.tensor_split(3, {d})[1]", f"{a}.squeeze({d})",
            f"{a}.permute({', '.join(map(str, reversed(range(t.dim()))))})",
        )
    )  # fmt: skip


def rearrange(g: Grower, name: str) -> str:
    a = g.pick("any", rank=1)
    t, rng = g[a], g.rng
    d, e = g.dim(a), g.dim(a)
    return f"{name} = " + rng.choice(
        (
            f"{a}.flip({d})", f"{a}.roll({rng.randrange(-3, 5)}, {d})", f"{a}.roll((1, 2), ({d}, {e}))", f"{a}.contiguous()",
            f"{a}.repeat({', '.join(['2'] + ['1'] * (t.dim() - 1))})",
            f"{a}.repeat_interleave(2, {d})", f"{a}.tril()", f"{a}.triu(1)", f"{a}.tile(2)",
            f"torch.rot90({a}, 1, ({d}, {e}))", f"{a}.flip(0, -1)" if t.dim() > 1 else f"{a}.flip(0)",
            f"torch.diag_embed({a})", f"F.pixel_shuffle({a}.reshape(1, 4, -1, 1), 2)",
            f"F.pixel_unshuffle({a}.reshape(1, 1, 2, -1), 2)", f"{a}.fliplr()" if t.dim() > 1 else f"{a}.flip(0)",
            f"F.channel_shuffle({a}.reshape(1, 4, -1, 1), 2)", f"{a}.expand_as({a}).clone()",
            f"torch.block_diag({a}.reshape(1, -1), {a}.reshape(-1, 1))[:9, :40]", f"torch.diagflat({a})[:40]",
        )
    )  # fmt: skip


def _factors(g: Grower, numel: int) -> str:
    """A random shape of so many elements."""
    shape, left = [], numel
    while left > 1 and len(shape) < 3:
        factor = g.rng.choice([f for f in range(2, left + 1) if left % f == 0])
        shape.append(factor)
        left //= factor
    if g.rng.random() < 0.3:
        shape.insert(g.rng.randint(0, len(shape)), 1)
    return ", ".join(map(str, [*shape, left] if left != 1 or not shape else shape))


def join(g: Grower, name: str) -> str:
    a = g.pick("any", rank=1)
    d = g.dim(a)
    same = [n for n in g.names if g[n].shape == g[a].shape]
    b, c = g.rng.choice(same), g.rng.choice(same)
    return f"{name} = " + g.rng.choice(
        (
            f"torch.cat([{a}, {b}], {d})", f"torch.cat([{a}, {b}, {c}], {d})", f"torch.stack([{a}, {b}], {d})",
            f"torch.stack([{a}, {b}, {c}], -1)",
            f"torch.cat([{a}.narrow({d}, 0, 1), {a}], {d})", f"torch.cat([{a}, {b}, {c}, {a}, {b}, {a}], {d})",
            f"torch.hstack([{a}, {b}])", f"torch.cat([{a}, {b}.flip({d})], {d})",
            f"torch.cat([{a}[:0], {b}], 0)", f"torch.cat([t * 2 for t in {a}.chunk(3, {d})], {d})",
            f"torch.cat([{b}, {a}.new_zeros({a}.shape)], {d})", f"torch.column_stack([{a}, {b}])",
        )
    )  # fmt: skip


def pad(g: Grower, name: str) -> str:
    a = g.pick("float", "int", rank=1)
    flat = f"{a}.reshape(1, {a}.shape[0], -1)"
    return f"{name} = " + g.rng.choice(
        (f"F.pad({a}, (1, 2))", f"F.pad({a}, (-1, 1), value=1)", f"F.pad({a}, (0, 1, 2, 0))",
        f"F.pad({flat}, (2, 1), mode='reflect')", f"F.pad({flat}, (1, 3), mode='replicate')",
         f"F.pad({flat}, (1, 1), mode='circular')", f"F.pad({a}, (0, -1))", f"torch.constant_pad_nd({a}, (1, 0), 2)",
         f"F.pad({flat}[None], (1, 1, 2, 0), mode='reflect')")
    )  # fmt: skip


# ---- indices --------------------------------------------------------------------------------------------------------


def _indices(g: Grower, top: int, shape: str, low: int = 0) -> str:
    """Positions below `top`, and from `low` on: an input, or computed."""
    if top == 0:
        raise Dropped
    if g.rng.random() < 0.6:
        dtype = g.rng.choice(("i64", "i64", "i32"))
        return g.add_input(f"randint({g.data_seed()}, {low}, {top}, {shape}).to({dtype}).to(D)")
    return _computed(g, top, shape)


def _computed(g: Grower, top: int, shape: str) -> str:
    numel = math.prod(map(int, shape.split(", ")))
    fits = [n for n in g.names if kind_of(g[n]) == "int" and g[n].numel() >= numel]
    if fits and g.rng.random() < 0.5:
        return f"({g.rng.choice(fits)}.reshape(-1)[:{numel}].reshape({shape}).long() % {top})"
    return f"((torch.arange({numel}, device=D) * {g.rng.randrange(1, 7)} + {g.rng.randrange(9)}) % {top}).reshape({shape})"


def _long(index: str) -> str:
    return f"{index}.long()" if index.startswith("x") else index


def index(g: Grower, name: str) -> str:
    a = g.pick("any", rank=1)
    t, rng = g[a], g.rng
    d = g.filled_dim(a)
    n, lead = t.shape[d], ":, " * d
    count = rng.choice((1, 3, 8, 17))
    where = _indices(g, n, str(count), -n)
    grid = list(t.shape)
    grid[d] = count
    forms = [f"{a}[{lead}{where}]", f"{a}[{lead}{where}, None]", f"{a}[{lead}{where}] * 2"]
    if t.dim() > 1 and d == 0 and t.shape[1]:
        other = _indices(g, t.shape[1], str(count), -t.shape[1])
        forms += [f"{a}[{where}, {other}]", f"{a}[{where}[:1], {other}]", f"{a}[{where}[:, None], {other}]"]
        forms += [f"{a}[{where}, ..., {other}]"] if t.dim() == 2 else []
    return f"{name} = " + rng.choice(forms)


def gather(g: Grower, name: str) -> str:
    a = g.pick("any", rank=1)
    t, rng = g[a], g.rng
    d = g.filled_dim(a)
    n = t.shape[d]
    grid = [rng.randint(1, m) if m > 1 and k != d and rng.random() < 0.3 else m for k, m in enumerate(t.shape)]
    grid[d] = rng.choice((1, 2, 5, n))
    shape = ", ".join(map(str, grid))
    where = _long(_indices(g, n, shape))
    count = rng.choice((1, 4, 9))
    line = _indices(g, n, str(count))
    if rng.random() < 0.5:
        return f"{name} = " + rng.choice(
            (
                f"{a}.gather({d}, {where})",
                f"torch.take_along_dim({a}, {where}, {d})"
                if grid[:d] + grid[d + 1 :] == [*t.shape[:d], *t.shape[d + 1 :]]
                else f"{a}.gather({d}, {where})",
            )
        )
    return f"{name} = " + rng.choice(
        (f"{a}.index_select({d}, {line})", f"{a}.take({_long(_indices(g, t.numel(), str(count)))})")
    )


def embedding(g: Grower, name: str) -> str:
    a = g.pick("float", rank=2, most_rank=2)
    n = g[a].shape[0]
    shape = g.rng.choice(("1", "5", "2, 3", "1, 1", "4, 4"))
    where = _indices(g, n, shape)
    padding = g.rng.choice(("", f", padding_idx={n - 1}"))
    return f"{name} = " + g.rng.choice(
        (
            f"F.embedding({where}, {a}{padding})",
            f"F.embedding({where}, {a}).mean(0)",
            f"F.embedding_bag({where}.reshape(1, -1), {a}, mode='sum') * 0.2",
        )
    )


def scatter(g: Grower, name: str) -> str:
    """Sums at repeated positions."""
    a = g.pick("float", "int", rank=1)
    t, d = g[a], g.filled_dim(a)
    n = t.shape[d]
    count = g.rng.choice((1, 3, n))
    grid = list(t.shape)
    grid[d] = count
    shape = ", ".join(map(str, grid))
    line = _indices(g, n, str(count))
    full = f"({_long(line)}.reshape({', '.join('-1' if k == d else '1' for k in range(t.dim()))}).expand({shape}))"
    if g.rng.random() < 0.4:
        full = _long(_indices(g, n, shape))
    source = f"{a}.narrow({d}, 0, {count})"
    if g.rng.random() < 0.3:  # one number for many elements
        source = f"{a}.narrow({d}, 0, 1).expand({shape})"
    target = g.rng.choice((a, a, f"torch.zeros_like({a})"))
    how = g.rng.choice(("sum", "amax", "amin", "mean") if kind_of(t) == "float" else ("sum", "amax", "amin"))
    first = _indices(g, t.shape[0], "3") if t.shape[0] else line
    return f"{name} = " + g.rng.choice(
        (f"{target}.scatter_add({d}, {full}, {source})", f"{target}.index_add({d}, {line}, {source})",
        f"{target}.index_add({d}, {line}, {source}, alpha=2)",
         f"{target}.index_put(({first},), {a}[:1], accumulate=True)",
         f"{target}.scatter_reduce({d}, {full}, {source}, '{how}', include_self={g.rng.choice((True, False))})",
         f"{target}.scatter_add({d}, {full}, torch.ones_like({source}))")
    )  # fmt: skip


def assign(g: Grower, name: str) -> str:
    """Writes at positions that do not repeat, without accumulation."""
    a = g.pick("any", rank=1)
    t, d = g[a], g.filled_dim(a)
    n = t.shape[d]
    count = g.rng.randint(1, n)
    step = g.rng.choice([s for s in (1, 3, 5, 7) if s == 1 or n % s] or [1])
    line = f"((torch.arange({count}, device=D) * {step} + {g.rng.randrange(n)}) % {n})"
    shape = list(t.shape)
    shape[d] = count
    full = f"{line}.reshape({', '.join('-1' if k == d else '1' for k in range(t.dim()))}).expand({', '.join(map(str, shape))})"
    source, lead = f"{a}.narrow({d}, 0, {count})", ":, " * d
    return f"{name} = " + g.rng.choice(
        (f"{a}.index_copy({d}, {line}, {source})", f"{a}.scatter({d}, {full}, {source})", f"{a}.scatter({d}, {full}, 1)",
        f"{a}.index_fill({d}, {line}, 1)",
         f"{a}.clone()\n{name}[{lead}{line}] = {source}.flip({d})", f"{a}.clone()\n{name}[{lead}{line}] = 1",
         f"{a}.slice_scatter({a}.narrow({d}, 0, 1).flip(-1), {d}, {n - 1}, {n})",
         f"{a}.select_scatter({a}.select({d}, 0), {d}, {n - 1})",
         f"{a}.masked_scatter({a} > 0, {a})" if kind_of(t) != "bool" else f"{a}.clone()",
         f"{a}.diagonal_scatter({a}.diagonal() * 1)")
    )  # fmt: skip


# ---- writes ---------------------------------------------------------------------------------------------------------

WRITES = (
    "{x}.mul_(2)", "{x}.select({d}, {last}).add_(1)", "{x}[0].copy_({x}[-1])", "{x}.transpose(0, -1).add_(2)",
    "{x}[1:].mul_(3)", "{x}[..., ::2] = 1", "{x}.view(-1)[:3].zero_()",
    "{x}.masked_fill_({x} > 1, 1)", "{x}.diagonal().fill_(2)", "{x}.clamp_(-1, 1)", "{x}.copy_({x}.flip(0))", "{x} += {b}",
    "{x}.add_({b}, alpha=2)", "{x}[:1] = {x}[-1:]", "{x}[1:] = {x}[:-1].clone()",
    "{x}[1:] += {x}[:-1].clone()", "{x}.narrow({d}, 0, 1).fill_(0)",
    "{x}.unsqueeze(0)[0].neg_()", "{x}.zero_()", "{x}[{x} > 0] = 2",
    "{x}.index_fill_({d}, torch.zeros(1, dtype=i64, device=D), 3)",
    "{x}.expand(2, *{x}.shape)[1].add_(1)", "{x}.copy_({b})", "{x}.sub_({x}.select({d}, 0).unsqueeze({d}).clone())",
    "{x}.index_add_({d}, torch.zeros(1, dtype=i64, device=D), {x}.narrow({d}, 0, 1))",
    "{x}.reshape(-1).add_(1)", "{x}.chunk(2, {d})[0].mul_(-1)", "{x}.fill_(2)",
    "{x}[..., -1] = {x}[..., 0]", "{x}.where({x} > 0, {b}).clamp_(max=3)", "{x}.tril_()",
    "{x}.put_(torch.arange(2, device=D), {x}.reshape(-1)[:2] * 2)", "{x}.scatter_({d}, {x}.long() * 0, 1)",
    "for t in {x}.unbind({d}): t.add_(t.sum())",
)  # fmt: skip
# Dynamo refuses these of an input.
VIEW_WRITES = ("{x}.t_()", "{x}.squeeze_()", "{x}.transpose_(0, -1)", "{x}.unsqueeze_(0)")
FLOAT_WRITES = ("{x}.tanh_()", "{x}.addcmul_({b}, {b}, value=0.1)", "{x}.mul_({b})", "{x}.relu_()", "{x}.sigmoid_()",
                "{x}.div_(3)", "{x}.lerp_({x} * 2, 0.5)", "{x}[:, None].mul_(0.5)",
                "{x}.sub_({x}.mean())", "{x}.div_({x}.abs().sum({d}, keepdim=True) + 1)", "{x}.copy_({x}.cumsum({d}) * 0.1)",
                "F.relu({x}, inplace=True)", "{x}.softmax({d}).mul_(2)")  # fmt: skip


def _write(g: Grower, x: str) -> str:
    t = g[x]
    d = g.dim(x)
    forms = (*WRITES, *FLOAT_WRITES, *FLOAT_WRITES) if kind_of(t) == "float" else WRITES
    if x.startswith("v"):
        forms += VIEW_WRITES
    return g.rng.choice(forms).format(x=x, d=d, last=max(t.shape[d] - 1, 0), b=g.partner(x, kind_of(t)))


def mutate(g: Grower, name: str) -> str:
    """Writes into a copy."""
    a = g.pick("float", "int", rank=1)
    g.space[name] = g[a].clone()
    return "\n".join(
        [f"{name} = {a}.clone()", *(_write(g, name).replace(f"{name}, {name}", name) for _ in range(g.rng.choice((1, 2, 2))))]
    )


def mutate_input(g: Grower, name: str) -> str:
    del name
    names = [n for n, _ in g.inputs if g[n].dim() and n in g.names]
    if not names:
        raise Dropped
    return _write(g, g.rng.choice(names))


def mutate_result(g: Grower, name: str) -> str:
    """Writes into an earlier result, which others may be views of."""
    del name
    names = [n for n in g.names if n.startswith("v") and g[n].dim()]
    if not names:
        raise Dropped
    return _write(g, g.rng.choice(names))


# ---- contractions, windows ------------------------------------------------------------------------------------------


def contract(g: Grower, name: str) -> str:
    a = g.pick("float", rank=2)
    b = g.pick("float", rank=1)
    own = DTYPE_NAMES[g[a].dtype]
    k = f"{a}.shape[-1]"
    right = f"{b}.reshape(-1)[:{k} * ({b}.numel() // {k})].reshape({k}, -1).to({own}, copy=True)"
    row = f"{a}.reshape(-1, {k})"
    return f"{name} = " + g.rng.choice(
        (f"({a} @ {a}.transpose(-1, -2)) * 0.05", f"F.linear({a}, {row}[:3]) * 0.1", f"({a} @ {right}) * 0.1",
        f"torch.addmm({row}[:, :1], {row}, {right}, beta=0.5, alpha=0.1)",
         f"torch.einsum('ij,kj->ik', {row}, {row} * 0.1)", f"{row}.mv({row}[0]) * 0.1", f"torch.outer({row}[0], {row}[:, 0])",
         f"torch.relu({row} @ {right}) * 0.1 + {row}.sum(-1, keepdim=True) * 0.1",
         f"torch.bmm({row}[None], {row}.t()[None]) * 0.05",
         f"F.linear(F.gelu(F.linear({row}, {row}[:5] * 0.1)), {row}[:5].t() * 0.1)",
         f"torch.einsum('ij,ij->i', {row}, {row}) * 0.1", f"torch.dot({row}[0], {row}[-1]) * 0.1",
         f"F.scaled_dot_product_attention({row}[None], {row}[None].flip(1), {row}[None])",
         f"torch.baddbmm({row}[None, :, :1], {row}[None], {row}.t()[None], alpha=0.05)", f"({row}.t() @ {row}).softmax(-1)",
         f"torch.tensordot({row}, {row}, dims=([0], [0])) * 0.05", f"F.linear({row}, {row}[:2], {row}[0, :2]) * 0.1",
         f"torch.cdist({row}, {row} + 1)", f"(({row} * 0.1) @ ({row}.t() + 0.1)).sum(0)",
         f"torch.kron({row}[:2, :2], {row}[:3, :3])", f"F.linear({row}, {row}[:1] * 0.5, {row}[0, :1])",
         f"(({row}[:, :1] * 2).t() @ {row}) * 0.1 + ({row}[:, :1] * 2).sum(0)")
    )  # fmt: skip


def integer_contract(g: Grower, name: str) -> str:
    a = g.pick("int", rank=2, most_rank=2)
    return f"{name} = " + g.rng.choice((f"{a} @ {a}.t()", f"{a}.mv({a}[0])", f"torch.einsum('ij,ij->i', {a}, {a})"))


def _weight(g: Grower, dtype: str, *shape: int) -> str:
    return g.add_input(f"(randn({g.data_seed()}, {', '.join(map(str, shape))}) * 0.3).to({dtype}).to(D)")


def convolve(g: Grower, name: str) -> str:
    a = g.pick("float", rank=2)
    t, rng = g[a], g.rng
    c = rng.choice([c for c in (1, 2, 3, 4, 8) if t.numel() and t.numel() % c == 0] or [1])
    flat = f"{a}.reshape(1, {c}, -1)"
    pixels = t.numel() // c
    rows = rng.choice([r for r in (2, 3, 4, 5, 8) if pixels % r == 0] or [1])
    image = f"{a}.reshape(1, {c}, {rows}, -1)"
    own = DTYPE_NAMES[t.dtype]
    w1, w2 = _weight(g, own, 2, c, 3), _weight(g, own, 3, c, 3, 2)
    depth, up = _weight(g, own, c, 1, 3), _weight(g, own, c, 2, 2, 3)
    return f"{name} = " + rng.choice(
        (f"F.conv1d({flat}, {w1}, padding=1)", f"F.conv1d({flat}, {w1}, stride=2, padding=2, dilation=2)",
        f"F.conv2d({image}, {w2}, padding=1)", f"F.conv2d({image}, {w2}, {w2}[:, 0, 0, 0], stride=2, padding=2)",
         f"F.conv1d({flat}, {depth}, padding=1, groups={c})", f"F.conv_transpose2d({image}, {up}, stride=2)",
         f"torch.relu(F.conv1d({flat}, {w1}, padding=1)) * 0.5", f"F.conv1d({flat}, {w1}, padding='same')")
    )  # fmt: skip


def window(g: Grower, name: str) -> str:
    a = g.pick("float", rank=2)
    flat = f"{a}.reshape(1, {a}.shape[0], -1)"
    image = f"{a}.reshape(1, 1, {a}.shape[0], -1)"
    return f"{name} = " + g.rng.choice(
        (f"F.avg_pool1d({flat}, 2, 1)", f"F.max_pool1d({flat}, 3, 2, 1)", f"F.avg_pool2d({image}, 2, 1, 1)",
        f"F.max_pool2d({image}, 3, 2, 1)", f"F.adaptive_avg_pool1d({flat}, 3)", f"F.adaptive_max_pool2d({image}, (2, 3))",
         f"F.interpolate({flat}, scale_factor=2)", f"F.interpolate({image}, size=(3, 5), mode='bilinear')",
         f"F.interpolate({flat}, size=7, mode='linear', align_corners=True)", f"F.unfold({image}, (2, 2), padding=1)",
         f"F.avg_pool2d({image}, 3, 2, 1, ceil_mode=True, count_include_pad=False)",
         f"F.max_pool2d({image}, 2, ceil_mode=True, return_indices=True)[1]", f"F.lp_pool1d({flat}.abs() + 0.1, 2, 2)",
         f"F.adaptive_avg_pool2d({image}, (2, 1))",
         f"F.fold(F.unfold({image}, (2, 2)), {a}.reshape({a}.shape[0], -1).shape, (2, 2)) * 0.3",
         f"F.interpolate({image}, size=(4, 4), mode='bicubic')", f"F.max_pool1d({flat}, 3, 1, dilation=2)",
         f"F.avg_pool3d({image}[None, 0], (1, 2, 2), 1)")
    )  # fmt: skip


def create(g: Grower, name: str) -> str:
    a = g.pick("any", rank=1)
    own = DTYPE_NAMES[g[a].dtype]
    return f"{name} = " + g.rng.choice(
        (f"torch.arange({a}.shape[-1], device=D)", f"torch.full_like({a}, 1)",
        f"torch.zeros({a}.shape[0], device=D, dtype={own}) + 1", f"torch.arange({a}.shape[0], device=D) % 5",
         f"torch.ones({a}.shape, dtype=f32, device=D)", f"torch.linspace(-1, 1, {a}.shape[-1], dtype=f32, device=D)",
         f"torch.eye({a}.shape[-1], dtype={own}, device=D)[:40]", f"{a}.new_full((2, 3), 1)",
         "torch.tensor([1, 2, 3], device=D)", f"torch.empty_like({a}).fill_(1)",
         "torch.arange(5, 0, -2, device=D, dtype=i32)", f"torch.zeros_like({a}, dtype=f32)",
         "torch.scalar_tensor(2.5, dtype=f64, device=D)", f"{a}.new_ones(0)")
    )  # fmt: skip


def foreach(g: Grower, name: str) -> str:
    a = g.pick("float")
    b = g.partner(a, "float")
    return f"{name} = " + g.rng.choice(
        (f"torch._foreach_mul([{a}, {b}], 2.0)[1]", f"torch._foreach_add([{a}, {a}], [{a}, {a}])[0]",
        f"sum(torch._foreach_abs([{a}, {a} * 2]))", f"torch.stack(torch._foreach_norm([{a}, {b}]))",
        f"torch._foreach_sqrt([{a}.abs() + 0.1])[0]")
    )  # fmt: skip


def layered(g: Grower, name: str) -> str:
    """What nets are made of: convolutions with norms and activations, channels last, attention with heads and masks."""
    a = g.pick("float", rank=2)
    t, rng = g[a], g.rng
    c = rng.choice([c for c in (2, 4, 8) if t.numel() and t.numel() % c == 0] or [1])
    pixels = t.numel() // c
    rows = rng.choice([r for r in (2, 3, 4, 5, 8) if pixels % r == 0] or [1])
    form = rng.choice(("", ".contiguous(memory_format=torch.channels_last)"))
    image, own = f"{a}.reshape(1, {c}, {rows}, -1){form}", DTYPE_NAMES[t.dtype]
    if rng.random() < 0.6:
        w, wide = _weight(g, own, c, c, 3, 3), _weight(g, own, 2 * c, c, 1, 2)
        bias = rng.choice((f"{w}[:, 0, 0, 0]", f"{w}.reshape(-1)[:{c}]", "None"))
        act = rng.choice(("F.relu", "torch.sigmoid", "F.silu", "F.hardswish", "torch.tanh"))
        conv = f"F.conv2d({image}, {w}, {bias}, padding=1)"
        return f"{name} = " + rng.choice(
            (f"{act}({conv})", f"{act}({conv} + {image})", f"{conv} + {image}",
             f"F.conv2d({act}({conv}), {wide}, padding=(0, 1))",
             f"{act}(F.batch_norm({conv}, {w}[0, :, 0, 0], {w}[:, 0, 1, 1].abs() + 0.5, eps=0.1))",
             f"F.group_norm({conv}, 1, {w}[0, :, 0, 0], eps=0.1)", f"F.max_pool2d({act}({conv}), 3, 2, 1)",
             f"{conv}.mean((2, 3)) * {act}({image}.amax((2, 3)))", f"F.interpolate({conv}, scale_factor=2)",
             f"torch.cat([{conv}, {image}], 1)", f"{conv}.permute(0, 2, 3, 1).softmax(-1)")
        )  # fmt: skip
    heads = f"{a}.reshape(1, {c}, {rows}, -1)"
    causal = rng.choice((", is_causal=True", "", f", attn_mask=torch.ones({rows}, {rows}, dtype=boolean, device=D).tril(1)"))
    scores = f"({heads} @ {heads}.mT * 0.1)"
    return f"{name} = " + rng.choice(
        (f"F.scaled_dot_product_attention({heads}, {heads}.flip(2), {heads}{causal})",
         f"{scores}.softmax(-1) @ {heads}", f"({scores}.tanh() * 3).masked_fill({scores} < -0.1, -1e4).softmax(-1) @ {heads}",
         f"F.layer_norm({heads}.transpose(1, 2).flatten(2), {heads}.transpose(1, 2).flatten(2).shape[-1:], eps=0.1)",
         f"torch.stack({heads}.unbind(1)[::-1]).sum(0) * 0.1")
    )  # fmt: skip


def turned(g: Grower, name: str) -> str:
    """Complex numbers between real ones."""
    a = g.pick("float", rank=1)
    z = f"torch.complex({a}.float(), {a}.float().flip(0))"
    if DTYPE_NAMES[g[a].dtype] == "f64":  # where every float is float64, float() is not
        z = f"torch.complex({a}, {a}.flip(0))"
    return f"{name} = " + g.rng.choice(
        (f"({z} * {z}.conj()).real * 0.1", f"torch.view_as_real({z} * 1j)", f"{z}.abs()", f"({z} + {z}.mean()).imag",
         f"torch.view_as_real({z}.conj())[..., 1]", f"({z} / ({z}.abs() + 1)).real", f"torch.fft.rfft({z}.real).abs() * 0.1",
         f"torch.fft.ifft({z}).real", f"{z}.sum(-1).imag", f"({z} * {z}).real.cumsum(0) * 0.1",
         f"torch.polar({z}.abs(), {z}.real).imag")
    )  # fmt: skip


def small_float(g: Grower, name: str) -> str:
    """There and back: numbers of eight bits. What they round to may depend on the last bits, so few that are rounded again."""
    if g.gradients:
        raise Dropped
    a, kind = g.pick("float", "int"), g.rng.choice(("torch.float8_e4m3fn", "torch.float8_e5m2"))
    own = DTYPE_NAMES[g[a].dtype]
    if kind_of(g[a]) == "int":
        return f"{name} = ({a} % 16).to({kind}).to(f32)"
    return f"{name} = {a}.clamp(-100, 100).to({kind}).to({own})"


def collected(g: Grower, name: str) -> str:
    """Sums, products and extremes by positions that repeat, and numbers at pairs of positions."""
    a = g.pick("float", rank=2)
    t, rng = g[a], g.rng
    n, m = t.shape[:2]
    if not n or not m or not t.numel():
        raise Dropped
    count = rng.choice((1, 3, n))
    i, j = _long(_indices(g, n, str(count))), _long(_indices(g, m, str(count)))
    how, inc = rng.choice(("prod", "mean", "amax", "amin")), rng.choice((True, False))
    ones = ", ".join("1" for _ in range(t.dim() - 1))
    where = f"{i}.reshape(-1, {ones}).expand({', '.join(map(str, (count, *t.shape[1:])))})"
    source = f"{a}[:1].tanh().expand({', '.join(map(str, (count, *t.shape[1:])))})"
    return f"{name} = " + rng.choice(
        (f"{a}.tanh().scatter_reduce(0, {where}, {source}, '{how}', include_self={inc})",
         f"{a}.tanh().index_reduce(0, {i}, {source}, '{how}', include_self={inc})",
         f"{a}.index_put(({i}, {j}), {a}[:1, :1].sum(0)[0] * 0.1, accumulate=True)", f"{a}[{i}, {j}]",
         f"{a}[{i}[:, None], {j}]",
         f"{a}.clone()\n{name}[{i}, {j}] += 1", f"{a}.index_put((None, {j}), {a}[:, :1] * 0.1, accumulate=True)",
         f"torch.segment_reduce({a}.reshape({n}, -1)[:, 0].contiguous(), 'sum', lengths=torch.tensor([{n}, 0], device=D))",
         f"torch.bincount({i}, minlength={n})[:{n}] + 0",
         f"{a}.masked_scatter({a} > 0.1, torch.arange({t.numel()}, device=D).to({a}.dtype))")
    )  # fmt: skip


def branched(g: Grower, name: str) -> str:
    """Bodies of control flow."""
    if g.gradients:
        raise Dropped
    a = g.pick("float", rank=1)
    return f"{name} = " + g.rng.choice(
        (f"torch.cond({a}.sum() > 0, lambda t: t.sin() + 1, lambda t: t * 2, ({a}.clone(),))",
         f"torch.cond({a}.shape[0] > 2, lambda t: t.sum(-1), lambda t: t.amax(-1), ({a}.clone(),))")
    )  # fmt: skip


# ---- what eager refuses ---------------------------------------------------------------------------------------------


def outside(g: Grower, name: str) -> str:
    """Positions of which one is out of range."""
    a = g.pick("float", "int", rank=1)
    t = g[a]
    d = g.filled_dim(a)
    n = t.shape[d]
    bad = g.rng.choice((n, n + 3, -n - 1))
    count = g.rng.choice((1, 4, 9))
    where = g.add_input(f"randint({g.data_seed()}, 0, {n}, {count}).index_fill(0, torch.tensor([{count - 1}]), {bad}).to(D)")
    lead, ones = ":, " * d, ", ".join("-1" if k == d else "1" for k in range(t.dim()))
    shape = list(t.shape)
    shape[d] = count
    full = f"{where}.reshape({ones}).expand({', '.join(map(str, shape))})"
    return f"{name} = " + g.rng.choice(
        (f"{a}[{lead}{where}]", f"{a}.index_select({d}, {where})", f"{a}.gather({d}, {full})", f"F.embedding({where}, {a})",
        f"{a}.scatter_add({d}, {full}, {a}.narrow({d}, 0, 1).expand({', '.join(map(str, shape))}))",
         f"{a}.index_add({d}, {where}, {a}.narrow({d}, 0, 1).expand({', '.join(map(str, shape))}))",
         f"{a}.clone()\n{name}[{lead}{where}] = 1", f"{a}.take({where})" if bad >= n else f"{a}[{lead}{where}]",
         f"{a}.index_fill({d}, {where}, 0)")
    )  # fmt: skip


def by_zero(g: Grower, name: str) -> str:
    """Integer division by zero somewhere."""
    a = g.pick("int")
    b = g.partner(a, "int")
    return f"{name} = " + g.rng.choice(
        (
            f"{a} // ({b} & 1)",
            f"{a} % ({b} & 3)",
            f"torch.fmod({a}, {b} & 1)",
            f"torch.div({a}, {b} & 1, rounding_mode='trunc')",
            f"{a} // ({b} * 0)",
        )
    )


#: Operation -> how often it is tried.
OPERATIONS: dict[Operation, float] = {
    unary: 8, jump: 2, integer_unary: 4, binary: 8, special_binary: 2, integer_binary: 4, compare: 3, scalar: 3, rare: 3,
    logic: 1.5, classify: 1,
    select: 3, cast: 4, same_type: 1, bits: 0.5,
    reduction: 6, integer_reduction: 2, positions: 2, ordered: 1.5, search: 1, scan: 2.5, normalise: 4, loss: 1, view: 9,
    rearrange: 3, join: 4, pad: 1.5, index: 4, gather: 3,
    embedding: 1.5, scatter: 4, assign: 4, mutate: 5, mutate_input: 4, mutate_result: 3, contract: 2.5, integer_contract: 0.5,
    convolve: 1, window: 2, create: 2, foreach: 0.5,
    layered: 2.5, turned: 1.5, small_float: 0.7, collected: 2.5, branched: 0.5,
}  # fmt: skip

#: Operations that a program may end with because eager raises.
RAISING: dict[Operation, float] = {outside: 3, by_zero: 1}
