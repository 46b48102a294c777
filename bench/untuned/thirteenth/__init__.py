"""A thirteenth list of blocks that nobody tuned for: ordinary layers and programs of known models, at real sizes."""

from bench.untuned.block import Block
from bench.untuned.thirteenth import language, learning

BLOCKS: tuple[Block, ...] = (*language.BLOCKS, *learning.BLOCKS)
