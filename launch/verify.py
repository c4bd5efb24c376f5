"""Checks a run's files, or a model directory, bit for bit, and says what would be lost if the run stopped now.

  python -m launch.verify --workdir=runs/mine
  python -m launch.verify --model=my_model

Nothing is changed, the run may be in progress, and neither a model nor an accelerator is needed. Prints a line per
item: `ok`, `note` or `damaged`. Every array and file of every checkpoint is compared with the digests in its manifest,
every file of a model with those in its SHA256SUMS.

Exit codes: 0 all is intact; 1 something is damaged, and an intact checkpoint remains; 2 there is nothing to resume
from, a file of the model is damaged, or bad input.
"""

from absl import flags

from sdpo_jax import command

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a run, local or gs://.')
MODEL = flags.DEFINE_string('model', None, 'Hugging Face model directory to check, instead of a run.')


def main() -> int:
  from sdpo_jax.inference import verify

  return verify.verify(WORKDIR.value, MODEL.value, lambda text: print(text, flush=True))


if __name__ == '__main__':
  command.run(main)
