"""A second list of blocks that nobody tuned for: odd sizes, other dtypes, layouts and spellings than those of the first."""

from bench.untuned.block import Block
from bench.untuned.second import language, optimizers, science, vision

BLOCKS: tuple[Block, ...] = (*language.BLOCKS, *vision.BLOCKS, *science.BLOCKS, *optimizers.BLOCKS)
