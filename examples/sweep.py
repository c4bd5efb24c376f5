"""A sweep over learning rates with several seeds each, and a plot of the curves.

  python examples/sweep.py --output=runs/sweep

Every run has its own directory, so that an interrupted sweep resumes where it stopped. 2 rates × 2 seeds × 60 steps
take about three minutes on two CPU cores. The plot needs matplotlib (requirements-figures.txt).
"""

import argparse
import itertools
import pathlib

import matplotlib
import numpy as np

import sdpo_jax

matplotlib.use('agg')
import matplotlib.pyplot as plt


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--output', default='runs/sweep')
  parser.add_argument('--steps', type=int, default=60)
  parser.add_argument('--rates', type=float, nargs='+', default=[3e-4, 1e-3])
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1])
  arguments = parser.parse_args()
  output = pathlib.Path(arguments.output)

  for rate, seed in itertools.product(arguments.rates, arguments.seeds):
    config = sdpo_jax.load_config('configs/quickstart.py')
    config.optimizer.lr, config.seed = rate, seed
    config.trainer.total_training_steps = arguments.steps
    config.trainer.test_freq = 0
    sdpo_jax.train(config, output / f'{rate:g}_{seed}')

  figure, axes = plt.subplots(figsize=(6, 3.5), layout='constrained')
  for rate in arguments.rates:
    runs = [sdpo_jax.read_metrics(output / f'{rate:g}_{seed}') for seed in arguments.seeds]
    steps = [line['step'] for line in runs[0]]
    scores = np.array([[line['rollout/score_mean'] for line in run] for run in runs])  # [seeds, steps]
    axes.plot(steps, scores.mean(0), label=f'learning rate {rate:g}')
    axes.fill_between(steps, scores.min(0), scores.max(0), alpha=0.2)
    print(f'learning rate {rate:g}: score {scores[:, -1].mean():.2f} at step {steps[-1]}')
  axes.set(xlabel='step', ylabel='mean score', ylim=(0, 1))
  axes.legend()
  figure.savefig(output / 'curves.png', dpi=150)
  print(f'The curves are in {output / "curves.png"}.')


if __name__ == '__main__':
  main()
