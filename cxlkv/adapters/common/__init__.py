"""What all engine adapters share: requests, an object cache, keys, pools, settings, metrics; passes
of tokens, and attention over tensors and by a GPU (`steps`, `prefill`, `gpu_chunks`, `gpu_writes`)."""
