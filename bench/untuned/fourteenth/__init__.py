"""A fourteenth list of blocks that nobody tuned for: layers of papers that the others leave out."""

from bench.untuned.block import Block
from bench.untuned.fourteenth import images, learning, signals, texts

BLOCKS: tuple[Block, ...] = (*texts.BLOCKS, *images.BLOCKS, *signals.BLOCKS, *learning.BLOCKS)
