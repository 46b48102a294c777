"""A fifth list of blocks that nobody tuned for: generation, sparse attention, augmentation, solvers, types and views."""

from bench.untuned.block import Block
from bench.untuned.fifth import language, learning, modules, programs, science, vision

BLOCKS: tuple[Block, ...] = (
    *modules.BLOCKS,
    *language.BLOCKS,
    *vision.BLOCKS,
    *learning.BLOCKS,
    *science.BLOCKS,
    *programs.BLOCKS,
)
