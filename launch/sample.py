"""Answers one prompt with a run or a Hugging Face model; the completion alone goes to stdout.

python -m launch.sample --workdir=runs/quickstart --prompt="…" --temperature=0
"""

import sys

from absl import flags

from sdpo_jax import command
from sdpo_jax.config import ValKwargs
from sdpo_jax.training import inference

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a run; its newest checkpoint answers.')
MODEL = flags.DEFINE_string('model', None, 'Hugging Face model directory, instead of a run.')
PROMPT = flags.DEFINE_string('prompt', None, 'What the user says.', required=True)
MAX_TOKENS = flags.DEFINE_integer('max_tokens', 256, 'Tokens of the answer at most.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float('temperature', 0.6, 'Sampling temperature; 0 is greedy.', lower_bound=0.0)
TOP_P = flags.DEFINE_float('top_p', 0.95, 'Keep the smallest set of tokens with this probability.', 0.0, 1.0)
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the sampling noise.', lower_bound=0)


def main() -> None:
  text = inference.sample_text(
    workdir=WORKDIR.value,
    model=MODEL.value,
    prompt=PROMPT.value,
    sampling=ValKwargs(n=1, temperature=TEMPERATURE.value, top_p=TOP_P.value),
    max_tokens=MAX_TOKENS.value,
    seed=SEED.value,
  )
  sys.stdout.write(text + '\n')


if __name__ == '__main__':
  command.run(main)
