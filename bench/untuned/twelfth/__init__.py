"""A twelfth list of blocks that nobody tuned for: parts of programs of many fields that the earlier lists do not have."""

from bench.untuned.block import Block
from bench.untuned.twelfth import language, learning, science, vision

BLOCKS: tuple[Block, ...] = (*language.BLOCKS, *learning.BLOCKS, *vision.BLOCKS, *science.BLOCKS)
