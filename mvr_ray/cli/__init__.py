"""Provides the command line `mvr-ray`: commands, arguments, tables, progress."""

from mvr_ray.cli.commands import app as app
from mvr_ray.cli.commands import exit_on_error as exit_on_error
from mvr_ray.cli.commands import main as main
from mvr_ray.cli.commands import run_stage as run_stage
