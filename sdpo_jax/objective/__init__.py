"""What is minimised: pure array functions, from divergences on a support to the one loss.

Nothing here knows of models, prompts or files. Masks, denominators, weights and advantages come in as data.
"""
