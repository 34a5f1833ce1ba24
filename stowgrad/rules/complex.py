"""Complex numbers: parts, conjugates, views as real."""
