"""The training objective: pure array functions, from divergences over a support to the one loss.

Nothing here depends on models, prompts or files. Masks, denominators, weights and advantages are inputs.
"""
