"""What all engine adapters share: requests, an object cache, keys, pools, settings and metrics."""
