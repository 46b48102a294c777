"""Architectures written here, in torch.nn, where no package of the test environment has them."""
