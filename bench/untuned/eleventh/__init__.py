"""An eleventh list of blocks that nobody tuned for: what papers and repositories of the last years hold, as they spell it."""

from bench.untuned.block import Block
from bench.untuned.eleventh import fields, images, learning, sequences

BLOCKS: tuple[Block, ...] = (*sequences.BLOCKS, *learning.BLOCKS, *images.BLOCKS, *fields.BLOCKS)
