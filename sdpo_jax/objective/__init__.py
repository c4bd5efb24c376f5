"""The training objective as pure functions of arrays: divergences, weights of tokens, and the one loss.

Nothing here depends on models, prompts or files. Masks, denominators, weights and advantages are inputs.
"""
