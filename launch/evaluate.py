"""Evaluates a run or a model on the held-out rows of a config.

  python -m launch.evaluate --config=configs/quickstart.py --workdir=runs/quickstart --output=eval.json
  python -m launch.evaluate --config=configs/quickstart.py --model=configs/quickstart_model --output=base.json
  python -m launch.evaluate --config=configs/quickstart.py --model=HF_DIR --adapter=DIR --output=adapter.json
  python -m launch.evaluate --config=configs/quickstart.py --model=HF_DIR --cartridge=DIR --output=cartridge.json

The config says which questions are asked, and how they are sampled and graded (data.val_*, val_kwargs, environments).
The weights are those of --workdir, which may be a run in progress, or of --model. Prints a table; writes all metrics,
{"<task>": {"mean@n": …, "best@k": …, "maj@k": …, "acc/mean@n": …, …}}, to --output, and every sample to a file of that
name with the ending .samples.jsonl. docs/evaluation.md explains the numbers.
"""

from absl import flags

from sdpo_jax import command

flags.DEFINE_string('workdir', None, 'Directory of a run; its newest checkpoint is evaluated.')
flags.DEFINE_integer('step', None, 'Evaluate the checkpoint of this step of the run instead.', lower_bound=1)
flags.DEFINE_string(
  'model', None, 'Hugging Face model instead of a run: a directory, local or gs://…, or a name on the hub.'
)
OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write.', required=True)
OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace an --output that already exists.')
command.define_config()
command.define_adapter('It is evaluated with the --model that it was trained on.')
command.define_cartridge('It is evaluated with the --model that it was trained for.')
command.define_positions()
command.define_cluster()


def main() -> None:
  """Evaluate, write the results to --output, and print a table of the headline metrics."""
  import jax

  from sdpo_jax.inference import runs
  from sdpo_jax.training import closing_text

  config = command.load_config()
  command.join_cluster()
  evaluation = runs.evaluate_to_file(
    config,
    command.from_flags(runs.RunOrModel),
    output=OUTPUT.value,
    overwrite=OVERWRITE.value,
    announce=command.announce,
  )
  if jax.process_index() == 0:
    print(closing_text.evaluation_table(evaluation, config.val_kwargs.n))


if __name__ == '__main__':
  command.run(main)
