"""Patterns and whole models that nobody tuned for: what a user gets in the default mode, against eager and Inductor."""
