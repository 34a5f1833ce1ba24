"""Random ops: what is drawn has no gradient, or a pathwise one."""
