"""The quickstart's tiny base models and their tokenizers, made from scratch."""
