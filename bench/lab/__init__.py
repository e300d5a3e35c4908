"""`cxlkv lab` measures what attending to chosen pages costs a trained model in quality."""
