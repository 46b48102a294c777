"""Finds the smallest part of a user's model that kgen computes wrongly: `kgen bisect`."""
