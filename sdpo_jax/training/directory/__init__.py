"""The directory of a run: who may write there, what is in it, and what of it is gone."""
