"""What a language model is: decoders, their cache, Hugging Face import and export, tokenizers."""
