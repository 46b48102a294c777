"""Imperative programs, and what they are measured with."""
