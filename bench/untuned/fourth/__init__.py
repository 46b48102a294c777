"""A fourth list of blocks that nobody tuned for: whole modules, losses, filters, simulations, codes of few bits."""

from bench.untuned.block import Block
from bench.untuned.fourth import language, learning, modules, science, vision

BLOCKS: tuple[Block, ...] = (
    *modules.BLOCKS,
    *language.BLOCKS,
    *vision.BLOCKS,
    *learning.BLOCKS,
    *science.BLOCKS,
)
