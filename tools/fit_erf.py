"""Prints the tables of `erf_register` in templates/cpp/include/kgen/math.h: erf around the centres n * 17/64 for n < 16, and,
for AVX2, around n * 17/32 for n < 8.

Around 0 the polynomial is odd and fits the relative error, so that tiny arguments keep their accuracy; elsewhere it fits the
absolute error, by Chebyshev interpolation in 40 digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mpmath as mp


@dataclass(frozen=True)
class Table:
    """Polynomials of a degree around centres so far apart."""

    width: mp.mpf
    centres: int
    degree: int

    def around_zero(self) -> list[mp.mpf]:
        def ratio(square: mp.mpf) -> mp.mpf:
            x = mp.sqrt(square)
            return mp.erf(x) / x if x else 2 / mp.sqrt(mp.pi)

        odd = mp.chebyfit(ratio, [0, (self.width / 2) ** 2], (self.degree + 1) // 2)
        return [c for factor in reversed(odd) for c in (mp.mpf(0), factor)]

    def around(self, centre: mp.mpf) -> list[mp.mpf]:
        fit = mp.chebyfit(lambda r: mp.erf(centre + r), [-self.width / 2, self.width / 2], self.degree + 1)
        return list(reversed(fit))

    def rows(self) -> list[tuple[mp.mpf, ...]]:
        """For each power, the coefficients of all centres."""
        columns = [self.around_zero(), *(self.around(n * self.width) for n in range(1, self.centres))]
        return list(zip(*columns, strict=True))


TABLES = (Table(mp.mpf(17) / 64, 16, 5), Table(mp.mpf(17) / 32, 8, 7))


def main() -> None:
    mp.mp.dps = 40
    for table in TABLES:
        for power in table.rows():
            print("    {" + ", ".join(f"{float(c):.9e}f" for c in power) + "},")
        print()


if __name__ == "__main__":
    main()
