"""Writes what a run has trained, by default from its newest checkpoint, for other programs and commands.

  python -m launch.export --workdir=runs/quickstart --output=my_model
  python -m launch.export --workdir=runs/quickstart_lora --output=my_adapter
  python -m launch.export --workdir=runs/quickstart_lora --output=my_model --format=merged
  python -m launch.export --workdir=runs/my_cartridge --output=served --format=cartridge_pt --dtype=bfloat16

If the run trained all parameters, it writes a Hugging Face model directory for `transformers`. If it trained an adapter
(model.lora), --format=peft, the default, writes the adapter alone, for the library PEFT, and --format=merged the model
with the adapter added to it in float32. See docs/lora.md. If it trained a cartridge (model.cartridge),
--format=cartridge, the default, writes its slots as --cartridge reads them, and --format=cartridge_pt as servers read
them. See docs/cartridges.md.

The directory gets its name when it is complete. Weights are in files of at most 5 GB, with an index if there are
several, and SHA256SUMS has the digests of all files. Several processes (the flags below) gather tensor by tensor, and
process 0 writes.
"""

import sys

from absl import flags

from sdpo_jax import command

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
STEP = flags.DEFINE_integer('step', None, 'Step of the checkpoint to export; the newest if unset.', lower_bound=1)
OUTPUT = flags.DEFINE_string('output', None, 'New directory for what is written.', required=True)
WEIGHTS = flags.DEFINE_enum('weights', 'student', ['student', 'teacher'], 'Whose weights to export.')
FORMAT = flags.DEFINE_enum(
  'format',
  None,
  ['model', 'peft', 'merged', 'cartridge', 'cartridge_pt', 'cartridge_pt_fixed'],
  'What to write. Of a run that trained all parameters: model, the default. Of one that trained an adapter: peft, the '
  'default, or merged, the model with it. Of one that trained a cartridge: cartridge, the default, cartridge_pt, the '
  'published format, or cartridge_pt_fixed, as its first version spells it.',
)
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16', 'float16'], 'Dtype of the stored weights.')
command.define_cluster()


def main() -> None:
  import jax

  from sdpo_jax.inference import runs

  command.join_cluster()
  step = runs.export(WORKDIR.value, OUTPUT.value, WEIGHTS.value, DTYPE.value, STEP.value, FORMAT.value)
  if jax.process_index() == 0:
    print(f'The {WEIGHTS.value} of step {step} is in {OUTPUT.value}.', file=sys.stderr)


if __name__ == '__main__':
  command.run(main)
