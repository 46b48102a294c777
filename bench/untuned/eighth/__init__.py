"""An eighth list of blocks that nobody tuned for: stems, gates, scans, routers, preferences, optimizers, robots, tables."""

from bench.untuned.block import Block
from bench.untuned.eighth import language, learning, science, vision

BLOCKS: tuple[Block, ...] = (
    *vision.BLOCKS,
    *language.BLOCKS,
    *learning.BLOCKS,
    *science.BLOCKS,
)
