"""Reward functions that tests hand over; apart from these, since their process imports their module and all of its."""


def odd(completions, answer, **_):
  """Return a reward function in TRL's form."""
  return [
    {'score': float(sum(text.encode()) % 2 == right), 'feedback': 'The sum of the bytes must be odd.'}
    for text, right in zip(completions, answer, strict=True)
  ]


def right(completions, **_):
  return [1.0] * len(completions)
