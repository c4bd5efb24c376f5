"""The tiny base model of the quickstart and its tokenizer, made from nothing."""
