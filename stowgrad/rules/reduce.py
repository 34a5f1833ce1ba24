"""Reductions: sums, means, products, extrema, norms, variances, cumulative ops."""
