"""How good a model is and whether training goes wrong: held-out evaluation, metrics of completions, alarms."""
