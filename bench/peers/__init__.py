"""Other projects' stores and scans beside ours, in one run, each in an environment of its own."""
