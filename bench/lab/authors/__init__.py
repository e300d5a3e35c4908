"""Methods against the code of those who published them, on the same keys and queries."""
