"""Implementations of the op, one package an architecture."""
