"""Other projects' stores beside ours, in one run, each in an environment of its own."""
