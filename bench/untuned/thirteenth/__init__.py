"""A thirteenth list of blocks that nobody tuned for: whole layers of models and libraries in use, at their own sizes."""

from bench.untuned.block import Block
from bench.untuned.thirteenth import language, learning, sound, vision

BLOCKS: tuple[Block, ...] = (*language.BLOCKS, *learning.BLOCKS, *vision.BLOCKS, *sound.BLOCKS)
