"""What runs a compiled graph: a plain-data program and the native runtime that interprets it."""
