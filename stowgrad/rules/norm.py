"""Batch, group, layer, instance and RMS norm."""
