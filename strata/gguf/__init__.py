"""GGUF files: a header reader of our own (fast, lazy, hostile-input safe) and what a header says of a model."""
