"""Indexing, gather and scatter, masked selection."""
