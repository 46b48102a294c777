"""A thirteenth list of blocks that nobody tuned for: whole layers of models and libraries in use, at their own sizes."""

from bench.untuned.block import Block
from bench.untuned.thirteenth import sound, vision

BLOCKS: tuple[Block, ...] = (*vision.BLOCKS, *sound.BLOCKS)
