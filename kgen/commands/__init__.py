"""What people ask of kgen: `kgen.explain`, and the commands of `kgen.cli`."""
