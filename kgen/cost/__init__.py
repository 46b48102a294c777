"""What kernels cost: the cost model, and the protocol in which the scheduler asks for measured times."""
