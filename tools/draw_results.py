"""Draws docs/figures/matmuls.svg, the plot of the README, from the table of its record in docs/decisions/.

python -m tools.draw_results            # writes it
python -m tools.draw_results --check    # 1 where the file is another one
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "decisions" / "0010-gpu-matmul-results.md"
FIGURE = ROOT / "docs" / "figures" / "matmuls.svg"
TITLE = "Time of Inductor (max-autotune) over that of kgen: 22 matmuls with what fuses around them, one NVIDIA H200, 2026-11-23"
ROW = re.compile(r"^\| *\d+ \| (.+?) \|.*\| ([\d.]+) \|$", re.MULTILINE)

LEFT, RIGHT, TOP, LINE, MOST = 330, 400, 46, 19, 2.0
STYLE = """
  text { font: 12px sans-serif; fill: #24292f } .title { font-weight: bold; font-size: 13px } .bar { fill: #2f6fbb }
  .even { stroke: #24292f }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .bar { fill: #6ea8e6 } .even { stroke: #e6edf3 } }
"""


def measured() -> list[tuple[str, float]]:
    """Each matmul of the record's first table, with the ratio of its last column."""
    table = RECORD.read_text().partition("\n\nGeometric means")[0]
    return [(name, float(ratio)) for name, ratio in ROW.findall(table)]


def drawing() -> str:
    rows = measured()
    height = TOP + LINE * len(rows) + 12
    even = LEFT + RIGHT / MOST
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + RIGHT + 90} {height}" role="img" aria-label="{TITLE}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="8" y="18">{TITLE.partition(": ")[0]}</text>',
        f'<text x="8" y="36">{TITLE.partition(": ")[2]}; right of the line kgen is faster</text>',
    ]
    for number, (name, ratio) in enumerate(rows):
        y = TOP + LINE * number
        width = RIGHT * min(ratio, MOST) / MOST
        beyond = " (beyond the axis)" if ratio > MOST else ""
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{LINE - 5}"/>',
            f'<text x="{LEFT + width + 5:.1f}" y="{y + 13}">{ratio:.2f}{beyond}</text>',
        ]
    lines.append(f'<line class="even" x1="{even}" y1="{TOP - 4}" x2="{even}" y2="{height - 8}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.check:
        return int(FIGURE.read_text() != drawing())
    FIGURE.write_text(drawing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
