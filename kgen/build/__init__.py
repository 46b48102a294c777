"""From source text to loaded code: the toolchain and its outputs in the cache on disk."""
