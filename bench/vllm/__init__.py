"""vLLM with and without us in one run, each engine in a process of its own."""
