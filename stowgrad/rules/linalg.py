"""Linear algebra: inverses, solves, factorisations, determinants."""
