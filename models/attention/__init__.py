"""Attention of whole sequences and over a cache: the dispatch, its backends and their kernels."""
