"""Interpolation, grid sampling, padding by reflection and replication, pixel shuffles."""
