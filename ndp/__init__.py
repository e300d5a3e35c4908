"""Near-data processing: score the cached keys where they lie, choose pages, attend to them."""
