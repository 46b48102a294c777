"""A sixth list of blocks that nobody tuned for: gates in scores, streams, elements, records of events, codes, odd inputs."""

from bench.untuned.block import Block
from bench.untuned.sixth import language, learning, records, science, vision

BLOCKS: tuple[Block, ...] = (
    *language.BLOCKS,
    *vision.BLOCKS,
    *learning.BLOCKS,
    *records.BLOCKS,
    *science.BLOCKS,
)
