"""Prints the table of `erf_register` in templates/cpp/include/kgen/math.h: erf around the centres n * 17/32 for n < 8.

Around 0 the polynomial is odd and fits the relative error, so that tiny arguments keep their accuracy; elsewhere it fits the
absolute error, by Chebyshev interpolation in 40 digits.
"""

from __future__ import annotations

import mpmath as mp

WIDTH, CENTRES, DEGREE = mp.mpf(17) / 32, 8, 7


def around_zero() -> list[mp.mpf]:
    def ratio(square: mp.mpf) -> mp.mpf:
        x = mp.sqrt(square)
        return mp.erf(x) / x if x else 2 / mp.sqrt(mp.pi)

    odd = mp.chebyfit(ratio, [0, (WIDTH / 2) ** 2], (DEGREE + 1) // 2)
    return [c for factor in reversed(odd) for c in (mp.mpf(0), factor)]


def around(centre: mp.mpf) -> list[mp.mpf]:
    fit = mp.chebyfit(lambda r: mp.erf(centre + r), [-WIDTH / 2, WIDTH / 2], DEGREE + 1)
    return list(reversed(fit))


def main() -> None:
    mp.mp.dps = 40
    columns = [around_zero(), *(around(n * WIDTH) for n in range(1, CENTRES))]
    for power in zip(*columns, strict=True):
        print("    {" + ", ".join(f"{float(c):.9e}f" for c in power) + "},")


if __name__ == "__main__":
    main()
