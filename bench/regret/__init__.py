"""What the choices of templates cost: `python -m bench.regret`."""
