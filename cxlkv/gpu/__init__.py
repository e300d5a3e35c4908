"""What joins a pool and a GPU: mapping, copies, the hot buffer, the decode step."""
