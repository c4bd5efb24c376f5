"""Verifies the files of a run or a model, bit for bit.

  python -m launch.verify --workdir=runs/mine
  python -m launch.verify --model=my_model

Compares every array and file of every checkpoint with the digests in its manifest, or every file of a model with those
in its SHA256SUMS. Prints a line per item, `ok`, `note` or `damaged`, whether a resume is refused, and what would be
lost if the run stopped now. Nothing is changed, the run may be in progress, and neither a model nor an accelerator is
needed.

Exit codes: 0 everything is intact; 1 something is damaged, but an intact checkpoint remains; 2 there is nothing to
resume from, a file of the model is damaged, or bad input.
"""

from absl import flags

from sdpo_jax import command

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a run, local or gs://.')
MODEL = flags.DEFINE_string('model', None, 'Hugging Face model directory to check, instead of a run.')


def main() -> int:
  """Verify a run or a model, print a line per item, and return the exit code."""
  from sdpo_jax.inference import verify

  return verify.verify(WORKDIR.value, MODEL.value, lambda text: print(text, flush=True))


if __name__ == '__main__':
  command.run(main)
