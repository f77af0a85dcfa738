"""Diptych: a workbench for image-text retrieval."""

__version__ = "0.1.0"
__all__ = ["__version__"]
