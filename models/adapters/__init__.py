"""Adapters, which are trained while the model is frozen: LoRA and key-value prefixes (cartridges)."""
