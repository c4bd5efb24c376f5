"""Exports what a run has trained, for other programs and commands.

  python -m launch.export --workdir=runs/quickstart --output=quickstart_model
  python -m launch.export --workdir=runs/quickstart_lora --output=quickstart_lora_adapter
  python -m launch.export --workdir=runs/quickstart_lora --output=quickstart_lora_model --format=merged
  python -m launch.export --workdir=runs/my_cartridge --output=served --format=cartridge_pt --dtype=bfloat16
  python -m launch.export --workdir=runs/quickstart --output=quickstart_model --push=ME/MY_MODEL --private

The weights are by default those of the newest checkpoint. If the run trained all parameters, the result is a Hugging
Face model directory for `transformers`. If it trained an adapter (model.lora), --format=peft, the default, writes the
adapter alone, for the library PEFT, and --format=merged the model with the adapter merged in float32; see docs/lora.md.
If it trained a cartridge (model.cartridge), --format=cartridge, the default, writes its slots for --cartridge, and
--format=cartridge_pt for servers; see docs/cartridges.md.

README.md is a model card: base model, data, evaluations, settings, versions, and what to cite. --push also uploads the
directory to the Hugging Face hub, with the account of `hf auth login`; no file then names a local folder.

The directory gets its name when it is complete. Weights are in files of at most 5 GB, with an index if there are
several, and SHA256SUMS has the digests of all files. Several processes (the flags below) gather tensor by tensor, and
process 0 writes.
"""

import sys

from absl import flags

from sdpo_jax import command

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
STEP = flags.DEFINE_integer('step', None, 'Step of the checkpoint to export; the newest if unset.', lower_bound=1)
OUTPUT = flags.DEFINE_string('output', None, 'New directory to write.', required=True)
WEIGHTS = flags.DEFINE_enum('weights', 'student', ['student', 'teacher'], 'Whose weights to export.')
FORMAT = flags.DEFINE_enum(
  'format',
  None,
  ['model', 'peft', 'merged', 'cartridge', 'cartridge_pt', 'cartridge_pt_fixed'],
  'What to write. For a run that trained all parameters: model, the default; an adapter: peft, the default, or merged, '
  'the model with it; a cartridge: cartridge, the default, cartridge_pt, the published format, or cartridge_pt_fixed, '
  'with the names of its first version.',
)
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16', 'float16'], 'Dtype of the stored weights.')
PUSH = flags.DEFINE_string('push', None, 'OWNER/NAME of a model on the Hugging Face hub to upload to, too.')
PRIVATE = flags.DEFINE_bool('private', False, 'Make the pushed model private.')
command.define_cluster()


def main() -> None:
  """Export the run, push it if asked to, and say on stderr where the result is."""
  import jax

  from sdpo_jax.inference import runs

  command.join_cluster()
  form, push = FORMAT.value, PUSH.value
  step = runs.export(WORKDIR.value, OUTPUT.value, WEIGHTS.value, DTYPE.value, STEP.value, form, push, PRIVATE.value)
  if jax.process_index() == 0:
    pushed = '' if push is None else f', and on the hub as {push}'
    print(
      f'The {WEIGHTS.value} of step {step} is in {OUTPUT.value}{pushed}; its README.md says how to use it.',
      file=sys.stderr,
    )


if __name__ == '__main__':
  command.run(main)
