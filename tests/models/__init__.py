"""Small models of many kinds, for tests that want real networks rather than single ops."""
