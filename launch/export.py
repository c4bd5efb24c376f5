"""Writes what a run has trained, by default from its newest checkpoint, for other programs and commands.

  python -m launch.export --workdir=runs/quickstart --output=quickstart_model
  python -m launch.export --workdir=runs/quickstart_lora --output=quickstart_lora_adapter
  python -m launch.export --workdir=runs/quickstart_lora --output=quickstart_lora_model --format=merged
  python -m launch.export --workdir=runs/my_cartridge --output=served --format=cartridge_pt --dtype=bfloat16
  python -m launch.export --workdir=runs/quickstart --output=quickstart_model --push=ME/MY_MODEL --private

If the run trained all parameters, it writes a Hugging Face model directory for `transformers`. If it trained an adapter
(model.lora), --format=peft, the default, writes the adapter alone, for the library PEFT, and --format=merged the model
with the adapter added to it in float32. See docs/lora.md. If it trained a cartridge (model.cartridge),
--format=cartridge, the default, writes its slots as --cartridge reads them, and --format=cartridge_pt as servers read
them. See docs/cartridges.md.

README.md is a model card: base model, data, evaluations, settings, versions, and what to cite. --push uploads the
directory to the Hugging Face hub, as whoever has run `hf auth login` there, and then no file names a local folder.

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
PUSH = flags.DEFINE_string('push', None, 'OWNER/NAME of a model on the Hugging Face hub to which it is uploaded, too.')
PRIVATE = flags.DEFINE_bool('private', False, 'Make that model private.')
command.define_cluster()


def main() -> None:
  import jax

  from sdpo_jax.inference import runs

  command.join_cluster()
  form, push = FORMAT.value, PUSH.value
  step = runs.export(WORKDIR.value, OUTPUT.value, WEIGHTS.value, DTYPE.value, STEP.value, form, push, PRIVATE.value)
  if jax.process_index() == 0:
    pushed = '' if push is None else f', and on the hub as {push}'
    print(f'The {WEIGHTS.value} of step {step} is in {OUTPUT.value}{pushed}.', file=sys.stderr)


if __name__ == '__main__':
  command.run(main)
