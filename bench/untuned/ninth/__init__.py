"""A ninth list of blocks that nobody tuned for: ordinary networks as textbooks have them, at sizes of no benchmark."""

from bench.untuned.block import Block
from bench.untuned.ninth import images, losses, sequences

BLOCKS: tuple[Block, ...] = (*images.BLOCKS, *sequences.BLOCKS, *losses.BLOCKS)
