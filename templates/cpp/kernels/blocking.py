"""How the C++ matmul (`include/kgen/matmul.h`) cuts a problem, by its sizes: a rule, not a search.

What it weighs, for m by k times k by n:

- Rows are packed once for all threads, over all of k: as many as 8 MiB of words hold. More rows at a time mean that the columns
  are packed fewer times; with 512 of them that costs 3% of a float matmul, with 64 a quarter.
- A rectangle of results stays in a thread's L2 (half a MiB) with a block of columns (128 KiB).
- Threads take rectangles one after the other, so each should get several; where there are fewer rectangles than threads,
  and k is long, the sum over k is shared out too.
- A rectangle of several matmuls with a joint epilogue holds the results of all of them.
- Where results are stored in order along rows (or columns), threads share columns (or rows) alone. Low rectangles mean that
  columns are packed more often, so each thread gets fewer then.
- Up to 16 rows the matmul is bound by reading the columns, which are then read where they lie; so it is with up to 16 columns,
  or up to 4 where sums are so short that adding up a register's lanes takes longest.
- Up to 96 rows columns whose k are neighbours are not packed either: each is read once for all rows, and what is prefetched
  ends with a rectangle, so that these are wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DOT_ROWS", "FEW_ROWS", "Blocking", "choose_blocking"]

# As in include/kgen/microkernel.h, few_rows.h and dots.h.
DEPTH = 256  # words along k in a packed block
FEW_ROWS = 16
SHORT_SUM, FEW_OF_SHORT = 32, 4  # terms of a sum, and columns of such sums that are read where they lie
DOT_ROWS = 96  # at most so many read columns whose k are neighbours where they lie
_REGISTER = {"avx512": 64, "avx2": 32, "generic": 16}

_PACKED_ROWS_BYTES = 8 << 20
_RESULT_BYTES = 576 << 10
_ROW_UNIT = 48  # rows are cut at multiples of it
_TILE_ROWS, _TILE_COLUMNS, _DOT_COLUMNS = 528, 128, 192  # of a rectangle at most
_TASKS = 4  # rectangles that a thread should get, where there are enough results
_ROW_TASKS, _LOW_ROWS = 2, 96  # where threads share rows alone: rows of rectangles for each, and the fewest in a rectangle
_PAIRED = (torch.bfloat16, torch.int8, torch.uint8)  # two to a word


@dataclass(frozen=True, slots=True)
class Blocking:
    """The fields of the C++ struct of that name."""

    rows: int
    tile_rows: int
    tile_columns: int
    parts: int = 1
    few_rows: int = 0

    def cpp(self) -> str:
        """The C++ initialiser."""
        return (
            f"Blocking{{.rows = {self.rows}, .tile_rows = {self.tile_rows}, .tile_columns = {self.tile_columns}, "
            f".parts = {self.parts}, .few_rows = {self.few_rows}}}"
        )


def choose_blocking(
    size: tuple[int, int, int], dtype: torch.dtype, isa: str, threads: int, rights: int = 1, order: str = ""
) -> Blocking:
    """The blocking for a `size` of m, n and k: m by k times `rights` matrices of k by n of `dtype`; for dynamic sizes, of their
    hints: any blocking is right for any size. `order` is the axis along which results are stored in order, so that threads
    share the other one alone.

    `few_rows` is 0 where m and n are larger: a caller whose m or n may also be small sets it to FEW_ROWS."""
    m, n, k = size
    word = 8 if dtype in (torch.float64, torch.int64) else 4
    panel = 2 * max(_REGISTER[isa] // word, 4)
    words = max(1, -(-k // (2 if dtype in _PAIRED else 1)))
    highest = min(_TILE_ROWS, _PACKED_ROWS_BYTES // (word * words))
    if order == "n" and threads > 1:
        each = -(-m // (_ROW_TASKS * threads))
        highest = min(highest, max(_LOW_ROWS, -(-each // _ROW_UNIT) * _ROW_UNIT))
    tile_rows = _cut(m, highest, _ROW_UNIT)
    rows = tile_rows * max(1, min(-(-m // tile_rows), _PACKED_ROWS_BYTES // (word * words * tile_rows), 4))
    widest = min(_DOT_COLUMNS if m <= DOT_ROWS else _TILE_COLUMNS, _RESULT_BYTES // (word * tile_rows * rights))
    shared = 1 if order == "m" else -(-m // tile_rows)
    wanted = -(-n * shared // (_TASKS * threads)) if order != "n" else n  # columns that leave each thread several rectangles
    tile_columns = max(panel, min(widest, wanted) // panel * panel)
    tiles = max(1, -(-m // tile_rows) * -(-n // tile_columns))
    parts = min(-(-threads // tiles), words // (2 * DEPTH)) if tiles < threads else 1
    few = FEW_OF_SHORT if n < m and k <= SHORT_SUM else FEW_ROWS
    return Blocking(rows, tile_rows, tile_columns, max(1, parts), FEW_ROWS if min(m, n) <= few else 0)


def _cut(size: int, most: int, unit: int) -> int:
    """The size of equal blocks of `size` that are at most about `most`, a multiple of `unit`."""
    most = max(unit, most // unit * unit)
    blocks = -(-max(1, size) // most)
    return -(-max(1, size) // (blocks * unit)) * unit
