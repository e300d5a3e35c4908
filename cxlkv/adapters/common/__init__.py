"""What all engine adapters share: requests, an object cache, keys, pools, settings and metrics;
passes of tokens, and attention to them over tensors and on a device.
"""
