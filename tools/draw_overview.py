"""Draws docs/figures/overview.svg: the stages of kgen, what passes between them, and where each is.

python -m tools.draw_overview            # writes it
python -m tools.draw_overview --check    # 1 where the file is another one
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "figures" / "overview.svg"


@dataclass(frozen=True, slots=True)
class Stage:
    """A box: the stage's name, what it does, its folder, and what it hands to the next one."""

    name: str
    does: str
    folder: str
    gives: str


STAGES = (
    Stage("rewrite", "iterations of unrolled loops become batches", "kgen/capture/batching.py", "Dynamo's graph"),
    Stage("capture", "AOTAutograd traces the program", "kgen/capture/", "aten graph"),
    Stage(
        "compile_bodies", "bodies of cond, while_loop, scan go through the stages", "kgen/capture/control_flow.py", "aten graph"
    ),
    Stage("replace_random", "random numbers become functions of a seed", "kgen/capture/rng.py", "aten graph"),
    Stage("reinplace", "writes that may go to existing memory are marked", "lowering/reinplace.py", "aten graph with marks"),
    Stage("lower", "operators become loops over values", "lowering/", "loop IR (kgen/ir/nodes.py)"),
    Stage("schedule", "transforms, fusion, choice of templates", "scheduler/", "plan (kgen/ir/plan.py)"),
    Stage("render", "templates fill their slots", "templates/", "C++ and Triton sources"),
    Stage("build", "g++ and Triton compile, the host is assembled", "kgen/build/, kgen/host/", "a callable"),
)
LEFT, WIDTH, HEIGHT, STEP, TOP = 20, 560, 46, 74, 20


def svg() -> str:
    """The figure."""
    height = TOP + STEP * len(STAGES) + 10
    parts = [_stage(one, TOP + STEP * k) for k, one in enumerate(STAGES)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{height}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip


def _stage(one: Stage, y: int) -> str:
    """The stage's box, and the arrow below it."""
    middle, bottom = LEFT + WIDTH // 2, y + HEIGHT
    tip = y + STEP - 2
    return "\n".join([
        f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3fb" stroke="#3b6fb6"/>',
        _text(LEFT + 12, y + 19, one.name, 'font-weight="bold"'),
        _text(LEFT + 12, y + 37, one.does, ""),
        _text(LEFT + WIDTH - 12, y + 19, one.folder, 'text-anchor="end" font-family="monospace"'),
        f'<path d="M{middle} {bottom} V{tip} m-4 -6 l4 6 l4 -6" fill="none" stroke="#555"/>',
        _text(middle + 12, bottom + 18, one.gives, 'fill="#555"'),
    ])  # fmt: skip


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'.replace(" >", ">")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(arguments).check:
        return int(not FIGURE.exists() or FIGURE.read_text() != svg())
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
