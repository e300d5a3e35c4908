"""The demo: a small trained model answers from pages that lie in a pool."""
