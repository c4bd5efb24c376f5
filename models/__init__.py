"""Language models: decoders, their cache, Hugging Face import and export, tokenizers."""
