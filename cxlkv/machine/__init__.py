"""The machine folder reads what memory this machine has, and prepares what a pool needs of it."""
