"""`cxlkv demo` with a trained language model: it answers questions about a document."""
