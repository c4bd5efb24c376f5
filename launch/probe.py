"""Measures, before any training, whether there is something to distil.

  python -m launch.probe --config=configs/quickstart.py

Prints how often the student succeeds, greedy and sampled, how many groups hold a success (what a scalar reward can
learn from), and how often the same model succeeds once it reads the feedback or the demonstration.
"""

from sdpo_jax import command
from sdpo_jax.training.probe import probe_model

command.define_config()


def main() -> None:
  for name, value in probe_model(command.load_config()).items():
    print(f'{name:32s}{value:.3f}')


if __name__ == '__main__':
  command.run(main)
