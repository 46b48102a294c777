"""A seventh list of blocks that nobody tuned for: detection, pictures, sounds, statistics, prices, samplers, graphs, bits."""

from bench.untuned.block import Block
from bench.untuned.seventh import images, learning, losses, sampling, science, signals

BLOCKS: tuple[Block, ...] = (
    *images.BLOCKS,
    *losses.BLOCKS,
    *sampling.BLOCKS,
    *learning.BLOCKS,
    *signals.BLOCKS,
    *science.BLOCKS,
)
