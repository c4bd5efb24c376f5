"""A reward function for TRL's GRPOTrainer, used unchanged, in a training loop written by hand.

  python examples/trl_reward.py --workdir=runs/trl_reward

The reward prefers answers that end in a 7. There is no feedback in words: the model learns from successful answers to
the same question. The run stops by itself as soon as nine answers in ten end in a 7.
"""

import argparse

import sdpo_jax


def ends_in_seven(completions, **kwargs):
  """Return 1 for completions that end in a 7; called with lists as keyword arguments, as in TRL."""
  return [float(text.strip().endswith('7')) for text in completions]


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--workdir', default='runs/trl_reward')
  parser.add_argument('--steps', type=int, default=60)
  arguments = parser.parse_args()

  config = sdpo_jax.load_config('configs/quickstart.py', {'trainer.total_training_steps': arguments.steps})
  rows = [{'prompt': f'Rotate the digits left: {number}'} for number in range(20000, 30000, 17)]

  for step in sdpo_jax.steps(config, arguments.workdir, rows=rows, grader=ends_in_seven):
    score = step.metrics['rollout/score_mean']
    print(f'step {step.number}: {score:.0%} end in a 7')
    if score >= 0.9:
      break
  print(f'It is in {arguments.workdir}, and goes on there when it is started again.')


if __name__ == '__main__':
  main()
