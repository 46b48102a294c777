"""Measurements: kgen against eager and Inductor. Nothing here asserts that a result is right (`--check` does, on request)."""
