"""Language models: decoders, key-value caches, adapters, tokenizers, and import from and export to Hugging Face."""
