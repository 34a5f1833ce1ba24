"""Embeddings and embedding bags."""
