"""The op table: one entry an operator, driving operator x dtype (x device) for every back end.

An entry gives a function of tensors, the makers of its example arguments, and the dtypes it admits. A test of a back end runs
``for case in cases(TABLE)`` and compares ``compiled(case.fn)(*case.args())`` with ``case.fn(*case.args())`` by `assert_agrees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
i8, u8, i16, i32, i64, boolean = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool
FLOATS = (f32, f64, bf16)
INTEGERS = (i64, i32, u8)
NUMBERS = FLOATS + INTEGERS
ANY = (*NUMBERS, boolean)


class Maker:
    """Random tensors of one dtype on one device. `low` and `high` bound floats; integers are small, without zero if asked."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(
        self, *shape: int, low: float = -3, high: float = 3, dtype: torch.dtype | None = None, nonzero: bool = False
    ) -> Any:
        dtype = dtype or self.dtype
        if dtype is boolean:
            made = torch.rand(shape, generator=self.generator) > 0.5
        elif dtype.is_floating_point:
            made = (torch.rand(shape, generator=self.generator, dtype=f64) * (high - low) + low).to(dtype)
        else:
            least = 0 if dtype is u8 else int(low)
            made = torch.randint(least, max(int(high), least + 2) + 1, shape, generator=self.generator).to(dtype)
            made = torch.where(made == 0, torch.ones_like(made), made) if nonzero else made
        return made.to(self.device)

    def strided(self, *shape: int, **how: Any) -> torch.Tensor:
        """A tensor whose dimensions lie in memory in the opposite order."""
        return self(*reversed(shape), **how).permute(*reversed(range(len(shape))))  # type: ignore[no-any-return]

    def edges(self) -> torch.Tensor:
        """Every special value of a float, and some plain ones."""
        inf, nan = float("inf"), float("nan")
        return torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 100.0, -100.0, inf, -inf, nan], device=self.device).to(
            self.dtype
        )


Args = tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """`inputs(maker)` yields argument tuples. `tolerance` replaces the dtype's default (relative and absolute);
    `dynamic` entries make sense with symbolic sizes; `extern` ones may call libraries."""

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[Maker], list[Args]]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    tolerance: float | None = None
    dynamic: bool = True
    extern: bool = False


@dataclass(frozen=True)
class Case:
    entry: Entry
    dtype: torch.dtype
    device: str = "cpu"
    fn: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fn", self.entry.fn)

    def __str__(self) -> str:
        return f"{self.entry.name}-{str(self.dtype).removeprefix('torch.')}"

    def samples(self) -> list[Args]:
        return self.entry.inputs(Maker(self.dtype, self.device))


def cases(table: list[Entry], device: str = "cpu", dtypes: tuple[torch.dtype, ...] | None = None) -> Iterator[Case]:
    for entry in table:
        for dtype in entry.dtypes:
            if dtypes is None or dtype in dtypes:
                yield Case(entry, dtype, device)


# ---- agreement ------------------------------------------------------------------------------------------------------

TOLERANCE = {f16: 2e-3, bf16: 1.6e-2, f32: 2e-5, f64: 1e-9}


def assert_agrees(fn: Callable[..., Any], args: Args, got: Any, want: Any, tolerance: float | None = None) -> None:
    """`got` equals eager's `want` within the dtype's tolerance, or is no farther than eager from the result in float64."""
    got, want = _flat(got), _flat(want)
    assert len(got) == len(want)
    exact: list[torch.Tensor] | None = None
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        close = tolerance or TOLERANCE.get(b.dtype, 0)
        try:
            torch.testing.assert_close(a, b, rtol=close, atol=close, equal_nan=True)
        except AssertionError:
            exact = exact or _flat(fn(*(_wide(x) for x in args)))
            if not b.dtype.is_floating_point or not _no_worse(a, b, exact[position], close):
                raise


def _no_worse(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, close: float) -> bool:
    ours, theirs = ((t.double() - exact).abs().nan_to_num(0.0) for t in (got, eager))
    same_kind = torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    return same_kind and bool((ours <= 2 * theirs + close * exact.abs().nan_to_num(0.0)).all())


def _wide(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_wide(v) for v in x)
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _flat(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for item in tree for t in _flat(item)] if isinstance(tree, list | tuple) else []


# ---- argument makers ------------------------------------------------------------------------------------------------


def one(low: float = -3, high: float = 3, edges: bool = True) -> Callable[[Maker], list[Args]]:
    """One tensor of several shapes and layouts, and the special floats."""

    def make(m: Maker) -> list[Args]:
        tensors = [
            m(3, 5, low=low, high=high),
            m(low=low, high=high),
            m(0, 4),
            m.strided(4, 1, 7, low=low, high=high),
            m(37, low=low, high=high),
        ]
        if edges and m.dtype.is_floating_point:
            tensors.append(m.edges())
        return [(t,) for t in tensors]

    return make


def two(low: float = -3, high: float = 3, nonzero: bool = False, edges: bool = True) -> Callable[[Maker], list[Args]]:
    """Two tensors: equal shapes, broadcast both ways, 0-d, empty, transposed, special floats against each other."""

    def make(m: Maker) -> list[Args]:
        how: dict[str, Any] = {"low": low, "high": high}
        shapes = [((3, 5), (3, 5)), ((3, 1), (1, 5)), ((4, 3), ()), ((), (2, 2)), ((0, 3), (1, 3)), ((2, 3, 4), (4,))]
        pairs = [(m(*a, **how), m(*b, nonzero=nonzero, **how)) for a, b in shapes]
        pairs.append((m.strided(5, 6, **how), m(5, 6, nonzero=nonzero, **how)))
        if edges and m.dtype.is_floating_point:
            pairs.append((m.edges()[:, None], m.edges()[None, :]))
        return pairs

    return make


def three(m: Maker) -> list[Args]:
    return [
        (m(3, 5), m(3, 5), m(3, 5, nonzero=True)),
        (m(3, 1), m(5), m(1, 5, nonzero=True)),
        (m.strided(4, 6), m(4, 6), m(nonzero=True)),
    ]


def shaped(*shapes: tuple[int, ...], low: float = -3, high: float = 3) -> Callable[[Maker], list[Args]]:
    def make(m: Maker) -> list[Args]:
        return [(m(*s, low=low, high=high),) for s in shapes]

    return make


REDUCED = shaped((3, 5), (4, 1, 6), (2, 33, 3), (7,), (1, 1))


def reduced_more(m: Maker) -> list[Args]:
    return [*REDUCED(m), (m.strided(5, 6),), (m(3, 0),), (m(0, 2),)]


def not_empty(m: Maker) -> list[Args]:
    return [*REDUCED(m), (m.strided(5, 6),)]


def with_nans(m: Maker) -> list[Args]:
    found = not_empty(m)
    return [*found, (m.edges().reshape(1, -1),), (m.edges().reshape(-1, 1),)] if m.dtype.is_floating_point else found


# ---- elementwise ----------------------------------------------------------------------------------------------------


def _torch(name: str) -> Callable[..., Any]:
    return getattr(torch, name, None) or getattr(torch.special, name)  # type: ignore[no-any-return]


def unary(
    names: str, dtypes: tuple[torch.dtype, ...] = FLOATS, low: float = -3, high: float = 3, edges: bool = True
) -> list[Entry]:
    return [Entry(n, _torch(n), one(low, high, edges), dtypes) for n in names.split()]


def binary(names: str, dtypes: tuple[torch.dtype, ...] = FLOATS, **how: Any) -> list[Entry]:
    return [Entry(n, _torch(n), two(**how), dtypes) for n in names.split()]


def scalar(name: str, fn: Callable[..., Any], dtypes: tuple[torch.dtype, ...] = NUMBERS, **how: Any) -> Entry:
    return Entry(name, fn, one(**how), dtypes)


UNARY = [
    *unary("abs neg sign square sgn", NUMBERS),
    *unary("signbit", ANY),
    *unary("floor ceil trunc round", NUMBERS),
    *unary("isnan isinf isfinite isposinf isneginf logical_not", ANY),
    *unary("bitwise_not", (*INTEGERS, boolean)),
    *unary("sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sigmoid", ANY),
    *unary("sin cos tan sinh cosh tanh asinh atan", (*FLOATS, i64, boolean)),
    *unary("asin acos atanh", low=-1, high=1),
    *unary("acosh", low=1, high=5),
    *unary("erf erfc i0 i0e i1 i1e sinc frac deg2rad rad2deg angle relu"),
    *unary("erfinv", low=-0.99, high=0.99),
    *unary("lgamma digamma entr ndtr ndtri log_ndtr erfcx logit", (f32, f64), low=0.1, high=0.9, edges=False),
    *unary("nan_to_num", NUMBERS),
    *unary("bessel_j0 bessel_j1 modified_bessel_i0 spherical_bessel_j0 airy_ai", (f32, f64), low=0.1, edges=False),
    scalar("round_decimals", lambda x: torch.round(x, decimals=2), (f32, f64)),
    scalar("polygamma", lambda x: torch.polygamma(2, x), (f32, f64), low=0.5, edges=False),
    scalar("logit_eps", lambda x: torch.logit(x, eps=0.1), low=0, high=1, dtypes=(f32, f64)),
]

BINARY = [
    *binary("add mul", ANY),
    *binary("sub", NUMBERS),
    *binary("true_divide", ANY, nonzero=True),
    *binary("floor_divide remainder fmod", NUMBERS, nonzero=True, edges=False),
    *binary("maximum minimum fmax fmin", ANY),
    *binary("eq ne lt le gt ge logical_and logical_or logical_xor", ANY),
    *binary("bitwise_and bitwise_or bitwise_xor", (*INTEGERS, boolean)),
    *binary("bitwise_left_shift bitwise_right_shift", INTEGERS, low=0),
    *binary("gcd lcm", INTEGERS),
    *binary("atan2 copysign", (*FLOATS, i64)),
    *binary("hypot logaddexp logaddexp2 xlogy xlog1py heaviside", FLOATS),
    *binary("nextafter", (f32, f64)),
    *binary("pow", FLOATS),
    Entry("pow_integers", torch.pow, two(low=0, high=7), INTEGERS),
    Entry("pow_negative_exponent", torch.pow, two(nonzero=True), (i64,)),
    *binary("igamma igammac", (f32, f64), low=0.1, edges=False),
    *binary("zeta", (f32, f64), low=1.5, edges=False),
    *binary("ldexp float_power", (f32, i64)),
    Entry("ldexp_whole", lambda x, y: torch.ldexp(x * 2.0**-20, (y * 60).to(torch.int32)), two(edges=False), FLOATS),
    Entry("div_floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), two(nonzero=True, edges=False), NUMBERS),
    Entry("div_trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc"), two(nonzero=True, edges=False), NUMBERS),
    Entry("add_alpha", lambda x, y: torch.add(x, y, alpha=3), two(), NUMBERS),
    Entry("sub_alpha", lambda x, y: torch.sub(x, y, alpha=2), two(), NUMBERS),
    Entry("mixed_int_float", lambda x, y: x + (y > 0) * 2 - y.to(torch.int32), two(edges=False), (f32, bf16, i64)),
]

SCALARS = [
    scalar("add_scalar", lambda x: x + 1.5),
    scalar("rsub_scalar", lambda x: 2 - x, FLOATS),
    scalar("div_scalar", lambda x: x / 3),
    scalar("rdiv_scalar", lambda x: 3 / x, FLOATS),
    scalar("eq_scalar_rounds", lambda x: (x * 0 + 0.1).eq(0.1), FLOATS, edges=False),
    scalar("remainder_scalar", lambda x: x % 3),
    scalar("floor_divide_scalar", lambda x: x // 2),
    *[scalar(f"pow_{p}", lambda x, p=p: x**p, (f32, f64)) for p in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 1.7, -3.0)],
    *[scalar(f"pow_{p}_integer", lambda x, p=p: x**p, INTEGERS) for p in (0, 1, 2, 5, 11)],
    scalar("pow_base", lambda x: 2.5**x, FLOATS),
    scalar("pow_integer_base", lambda x: 2 ** x.abs(), (i64,)),
    scalar("clamp", lambda x: x.clamp(-1, 2), FLOATS),
    scalar("clamp_min", lambda x: x.clamp(min=1)),
    scalar("clamp_max_float", lambda x: x.clamp(max=1.5)),
    Entry("clamp_tensor", lambda x, lo: x.clamp(lo, lo + 1), two(), (f32, i64)),
    scalar("masked_fill", lambda x: x.masked_fill(x > 1, 7)),
    scalar("where_scalar", lambda x: torch.where(x > 0, x, 2.5), (f32, i64)),
    Entry("where", lambda c, x, y: torch.where(c > 0, x, y), three, ANY[:-1]),
    Entry("lerp", torch.lerp, three),
    Entry("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2), three, NUMBERS),
    Entry("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), three),
    scalar("to_int", lambda x: x.to(torch.int32), edges=False),
    scalar("to_bool", lambda x: x.to(torch.bool)),
    scalar("to_half", lambda x: x.to(torch.float16) * 2, (f32, f64, i64, boolean)),
    scalar("to_bfloat16_and_back", lambda x: x.to(torch.bfloat16).to(torch.float32) - x, (f32,)),
    scalar("view_dtype", lambda x: x.view(torch.int32) ^ 1, (f32,)),
    scalar("view_dtype_narrow", lambda x: x.view(torch.int16) + 1, (bf16,)),
    scalar("view_dtype_from_bits", lambda x: (x.to(torch.int16) * 999).view(torch.bfloat16), (i64,)),
    scalar("fill", lambda x: torch.full_like(x, 3) + torch.ones_like(x)),
]

F = torch.nn.functional
ACTIVATIONS = [
    scalar("gelu", F.gelu, FLOATS, edges=False),  # eager's vectorised erf form gives NaN at infinity
    *[
        scalar(name, fn, FLOATS)
        for name, fn in {
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "mish": F.mish, "elu": F.elu,
            "celu": lambda x: F.celu(x, 0.7), "selu": F.selu, "leaky_relu": F.leaky_relu, "hardtanh": F.hardtanh,
            "relu6": F.relu6, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
            "softplus": F.softplus, "logsigmoid": F.logsigmoid,
            "softshrink": F.softshrink, "hardshrink": F.hardshrink, "tanhshrink": F.tanhshrink, "softsign": F.softsign,
            "threshold": lambda x: F.threshold(x, 0.1, 20),
        }.items()
    ],
    Entry("prelu", F.prelu, lambda m: [(m(2, 3, 4), m(3)), (m(5, 3), m(1))]),
    *[Entry(fn.__name__, fn, two(edges=False)) for fn in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)],
]  # fmt: skip

# ---- reductions, scans, norms ---------------------------------------------------------------------------------------

DIMS: dict[str, dict[str, Any]] = {"all": {}, "last": {"dim": -1}, "first_keep": {"dim": 0, "keepdim": True}}


def reduction(name: str, fn: Callable[..., Any], dtypes: tuple[torch.dtype, ...], inputs: Any = reduced_more) -> list[Entry]:
    return [Entry(f"{name}_{how}", lambda x, kw=kw: fn(x, **kw), inputs, dtypes) for how, kw in DIMS.items()]


def _first(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, **kw: tuple(fn(x, **kw)) if kw else fn(x)


REDUCTIONS = [
    *reduction("sum", torch.sum, ANY),
    *reduction("mean", torch.mean, FLOATS),
    *reduction("prod", torch.prod, ANY),
    *reduction("nansum", torch.nansum, (f32, f64), with_nans),
    *reduction("amax", lambda x, dim=(), **kw: torch.amax(x, dim, **kw), ANY, with_nans),
    *reduction("amin", lambda x, dim=(), **kw: torch.amin(x, dim, **kw), ANY, with_nans),
    *reduction("max", _first(torch.max), ANY, with_nans),
    *reduction("min", _first(torch.min), ANY, with_nans),
    *reduction("argmax", torch.argmax, NUMBERS, with_nans),
    *reduction("argmin", torch.argmin, NUMBERS, with_nans),
    *reduction("any", torch.any, ANY),
    *reduction("all", torch.all, ANY),
    *reduction("var", torch.var, FLOATS),
    *reduction("std", lambda x, **kw: torch.std(x, correction=0, **kw), FLOATS),
    *reduction("var_mean", lambda x, **kw: torch.var_mean(x, correction=2, **kw), FLOATS, not_empty),
    *reduction("count_nonzero", lambda x, dim=None, keepdim=False: torch.count_nonzero(x, dim), ANY),
    *[
        entry
        for p in (0, 1, 2, 3, 0.5, float("inf"), -float("inf"))
        for entry in reduction(f"norm_{p}", lambda x, p=p, **kw: torch.linalg.vector_norm(x, p, **kw), FLOATS, not_empty)
    ],
    Entry("logsumexp", lambda x: torch.logsumexp(x, -1), with_nans),
    Entry("logsumexp_two", lambda x: torch.logsumexp(x, (0, 1), True), shaped((3, 5), (2, 3, 4))),
    Entry("sum_two_dims", lambda x: x.sum((0, -1)), shaped((3, 5, 2), (4, 1)), ANY),
    Entry("sum_dtype", lambda x: x.sum(-1, dtype=torch.float32), reduced_more, NUMBERS),
    Entry("sum_0d", lambda x: (x.sum(), x.sum(0), x.prod(), x.amax(), x.max(0)[0], x.argmax()), shaped(()), NUMBERS),
    Entry("mean_0d", lambda x: (x.mean(), x.var(correction=0), x.logsumexp(0), x.softmax(0)), shaped(())),
    Entry("aminmax", lambda x: tuple(torch.aminmax(x, dim=-1)), not_empty, NUMBERS),
    Entry("sum_of_prod", lambda x, y: (x * y).sum(-1), lambda m: [(m(3, 5), m(3, 5)), (m(4, 1), m(7))], FLOATS),
    Entry("any_no_dims", lambda x: torch.any(x, dim=()), shaped((3, 2)), ANY),
]

SCANS = [
    Entry("cumsum", lambda x: x.cumsum(-1), reduced_more, ANY),
    Entry("cumsum_first", lambda x: x.cumsum(0), reduced_more, NUMBERS),
    Entry("cumprod", lambda x: x.cumprod(-1), reduced_more, ANY),
    Entry("cummax", lambda x: tuple(torch.cummax(x, -1)), with_nans, ANY),
    Entry("cummin", lambda x: tuple(torch.cummin(x, 0)), with_nans, ANY),
    Entry("logcumsumexp", lambda x: torch.logcumsumexp(x, -1), not_empty),
    Entry("scan_0d", lambda x: (x.cumsum(0), x.cumprod(0), *torch.cummax(x, 0)), shaped(()), NUMBERS),
]


def _weighted(*shapes: tuple[int, ...]) -> Callable[[Maker], list[Args]]:
    """Input, weight and bias for a normalisation; the last shape item gives their size."""
    return lambda m: [(m(*s), m(s[-1]), m(s[-1])) for s in shapes]


def _channelled(*shapes: tuple[int, ...]) -> Callable[[Maker], list[Args]]:
    return lambda m: [(m(*s), m(s[1]), m(s[1])) for s in shapes]


def _running(m: Maker) -> list[Args]:
    return [(m(*s), m(s[1]), m(s[1]), m(s[1]), m(s[1], low=0.5, high=2)) for s in ((4, 3, 5, 5), (6, 3), (2, 4, 7))]


NORMS = [
    Entry("softmax", lambda x: x.softmax(-1), with_nans),
    Entry("softmax_first", lambda x: x.softmax(0), not_empty),
    Entry("softmax_to_float", lambda x: x.softmax(-1, dtype=torch.float32), not_empty),
    Entry("log_softmax", lambda x: x.log_softmax(-1), not_empty),
    Entry("softmax_masked", lambda x: x.masked_fill(x > 0, float("-inf")).softmax(0), shaped((5, 4), low=-3, high=1)),
    Entry(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        _weighted((3, 5), (2, 3, 33), (4, 1, 16)),
        tolerance=None,
    ),
    Entry("layer_norm_plain", lambda x: F.layer_norm(x, x.shape[1:]), shaped((3, 5), (2, 3, 4))),
    Entry("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), _channelled((3, 4, 5), (2, 6, 3, 3), (3, 4))),
    Entry("rms_norm", lambda x, w, b: F.rms_norm(x, x.shape[-1:], w) + b, _weighted((3, 5), (2, 3, 33))),
    Entry("batch_norm", lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), _running),
    Entry(
        "batch_norm_training",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        _channelled((4, 3, 5, 5), (6, 3)),
    ),
    Entry("instance_norm", F.instance_norm, shaped((2, 3, 8), (2, 3, 4, 5))),
]

# ---- creation and lists ---------------------------------------------------------------------------------------------

CREATION = [
    Entry("arange", lambda x: x + torch.arange(x.shape[0], dtype=x.dtype), shaped((4,), (7,)), NUMBERS),
    Entry("arange_step", lambda x: x + torch.arange(3, 11, 2), shaped((4,), ()), (f32, i64)),
    Entry("arange_down", lambda x: x + torch.arange(4, 0, -1), shaped((4,), ()), (f32, i64)),
    Entry("arange_float", lambda x: x + torch.arange(0.5, 2.5, 0.5), shaped((4,), ()), (f32,)),
    Entry("linspace", lambda x: x + torch.linspace(-1, 3, 7), shaped((7,), ()), (f32,)),
    Entry("eye", lambda x: x + torch.eye(3, 4), shaped((3, 4), ()), (f32,)),
    Entry("full", lambda x: x + torch.full((2, 3), 1.5) + x.new_ones(3) + torch.zeros_like(x), shaped((2, 3), ()), (f32, i64)),
    Entry("tril", lambda x: (x.tril(), x.triu(1), x.tril(-1)), shaped((4, 5), (2, 3, 3)), ANY),
    Entry("scalar_tensor", lambda x: x * torch.scalar_tensor(2.0), shaped((3,)), (f32, bf16)),
]


def _lists(m: Maker) -> list[Args]:
    return [([m(3, 4), m(5), m()], [m(3, 4), m(5), m()])]


FOREACH = [
    Entry("foreach_add", lambda x, y: torch._foreach_add(x, y, alpha=2), _lists, NUMBERS),
    Entry("foreach_mul_scalar", lambda x, y: torch._foreach_mul(x, 3), _lists, NUMBERS),
    Entry("foreach_div_scalars", lambda x, y: torch._foreach_div(x, [1.0, 2.0, 3.0]), _lists),
    Entry("foreach_addcmul", lambda x, y: torch._foreach_addcmul(x, y, y, 0.5), _lists),
    Entry("foreach_lerp", lambda x, y: torch._foreach_lerp(x, y, 0.3), _lists),
    Entry("foreach_sqrt", lambda x, y: torch._foreach_sqrt(torch._foreach_abs(x)), _lists),
    Entry("foreach_norm", lambda x, y: torch._foreach_norm(x), _lists),
    Entry("foreach_maximum", torch._foreach_maximum, _lists, NUMBERS),
]

TABLE: list[Entry] = [*UNARY, *BINARY, *SCALARS, *ACTIVATIONS, *REDUCTIONS, *SCANS, *NORMS, *CREATION, *FOREACH]
