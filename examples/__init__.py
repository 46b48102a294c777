"""Short programs that use kgen; the tests run them."""
