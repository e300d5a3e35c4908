"""One module a case: it checks that what it times is right, then times it against a baseline."""
