"""A tenth list of blocks that nobody tuned for: what repositories of many fields hold, spelled as they spell it."""

from bench.untuned.block import Block
from bench.untuned.tenth import fields, images, tokens

BLOCKS: tuple[Block, ...] = (*tokens.BLOCKS, *images.BLOCKS, *fields.BLOCKS)
