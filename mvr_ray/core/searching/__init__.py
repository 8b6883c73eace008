"""Search exactly at the speed of a matrix product: scores, kernels for each machine, the scan, merging and pruning."""
