"""A third list of blocks that nobody tuned for: detection, speech, recommendation, reinforcement learning, generation."""

from bench.untuned.block import Block
from bench.untuned.third import generation, language, learning, science, speech, vision

BLOCKS: tuple[Block, ...] = (
    *vision.BLOCKS,
    *speech.BLOCKS,
    *learning.BLOCKS,
    *language.BLOCKS,
    *generation.BLOCKS,
    *science.BLOCKS,
)
