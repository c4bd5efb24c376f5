"""SDPO (Self-Distilled Policy Optimization, arXiv 2601.20802) in JAX."""

__version__ = '0.1.0'
