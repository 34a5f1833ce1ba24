"""Views and copies that move elements without changing them: reshape, permute, cat, pad, repeat, casts."""
