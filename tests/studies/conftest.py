"""Gives the tests of this folder the fixture `tiny`: random backbones of every supported kind."""

from random_backbones import tiny  # noqa: F401
