"""The kinds of tokenizer that GGUF files describe; `strata.runtime.tokenizer` is what the rest of Strata uses."""
