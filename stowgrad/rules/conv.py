"""Convolutions, forward and transposed."""
