"""Makes the quickstart's tiny base model from nothing (a few CPU-minutes).

  python -m launch.make_base --config=configs/quickstart.py --output=/tmp/base

The same seed gives the same model again with the same versions on the same machine; elsewhere one that is as good.
"""

import dataclasses
import sys

from absl import flags

from sdpo_jax import command
from sdpo_jax.quickstart.make_base import Recipe, make_base

OUTPUT = flags.DEFINE_string('output', None, 'Directory to make; model.path of the config if unset. It must be empty.')
STEPS = flags.DEFINE_integer('steps', Recipe.steps, 'Optimizer steps.', lower_bound=1)
SEED = flags.DEFINE_integer('seed', Recipe.seed, 'Of the initial weights and the lessons.', lower_bound=0)
command.define_config()


def main() -> None:
  config = command.load_config()
  output = OUTPUT.value or config.model.path
  recipe = dataclasses.replace(Recipe(), steps=STEPS.value, seed=SEED.value)
  make_base(config, output, recipe, announce=lambda text: print(text, file=sys.stderr, flush=True))
  print(output)


if __name__ == '__main__':
  command.run(main)
