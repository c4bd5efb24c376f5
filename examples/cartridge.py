"""A document distilled into a few trained slots that answer like the whole document.

  python examples/cartridge.py --workdir=runs/cartridge

16 slots learn to answer like the document of 193 tokens (`configs/facts_document.txt`), without right answers being
given. 300 steps take about a minute on two CPU cores.
"""

import argparse

import sdpo_jax


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--workdir', default='runs/cartridge')
  parser.add_argument('--steps', type=int, default=300)
  arguments = parser.parse_args()

  config = sdpo_jax.load_config('configs/cartridge_quickstart.py', {'trainer.total_training_steps': arguments.steps})
  config.trainer.test_freq = arguments.steps
  result = sdpo_jax.train(config, arguments.workdir)
  for step, metrics in sorted(result.evaluations.items()):
    [accuracy] = [value for name, value in metrics.items() if name.endswith('/mean@4') and '/acc/' not in name]
    print(
      f'step {step}: {accuracy:.1%} of the questions about the document answered with {config.model.cartridge.tokens} '
      'slots'
    )


if __name__ == '__main__':
  main()
