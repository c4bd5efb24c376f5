"""Attention of whole sequences and to a cache: the dispatch to backends, and their kernels."""
