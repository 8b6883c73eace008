"""Exact search at the speed of a matrix product: what a score is, kernels for each machine, and the scan over them."""
