"""Writes a checkpoint of a run, the newest if not told otherwise, as a Hugging Face model directory for `transformers`.

python -m launch.export --workdir=runs/quickstart --output=my_model

The directory gets its name when it is complete. Weights are in files of at most 5 GB, with an index if there are several,
and SHA256SUMS has the digests of all files. Several processes (the flags below) gather tensor by tensor, and process 0
writes.
"""

import sys

from absl import flags
import jax

from sdpo_jax import command
from sdpo_jax.inference import runs

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
STEP = flags.DEFINE_integer('step', None, 'Step of the checkpoint to export; the newest if unset.', lower_bound=1)
OUTPUT = flags.DEFINE_string('output', None, 'New directory for the model.', required=True)
WEIGHTS = flags.DEFINE_enum('weights', 'student', ['student', 'teacher'], 'Whose weights to export.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16', 'float16'], 'Dtype of the stored weights.')
command.define_cluster()


def main() -> None:
  command.join_cluster()
  step = runs.export(WORKDIR.value, OUTPUT.value, WEIGHTS.value, DTYPE.value, STEP.value)
  if jax.process_index() == 0:
    print(f'The {WEIGHTS.value} of step {step} is in {OUTPUT.value}.', file=sys.stderr)


if __name__ == '__main__':
  command.run(main)
