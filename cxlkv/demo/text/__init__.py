"""The demo on a local model and a text: perplexity and agreement at each page budget."""
