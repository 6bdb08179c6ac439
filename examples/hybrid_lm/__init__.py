"""The example: a small hybrid Gated DeltaNet/attention language model on text that every Python installation carries."""
