"""Sorting, top-k, order statistics."""
