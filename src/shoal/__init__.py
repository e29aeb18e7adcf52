"""Shoal: one inference gateway in front of every kind of inference server."""

from shoal._version import __version__

__all__ = ["__version__"]
