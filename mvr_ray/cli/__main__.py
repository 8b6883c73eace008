"""Runs the command line as `python -m mvr_ray.cli`."""

from mvr_ray.cli import main

main()
