"""Evaluates a run or a Hugging Face model on the held-out rows of a config.

  python -m launch.evaluate --config=configs/quickstart.py --workdir=runs/quickstart --output=eval.json
  python -m launch.evaluate --config=configs/quickstart.py --model=configs/quickstart_model --output=base.json

Writes {"<task>": {"mean@k": …, "best@k": …, "maj@k": …}} to --output and every sample to <output>.samples.jsonl.
"""

from absl import flags

from sdpo_jax import command
from sdpo_jax.training import inference, report

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a run; its newest checkpoint is evaluated.')
MODEL = flags.DEFINE_string('model', None, 'Hugging Face model directory, instead of a run.')
OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write.', required=True)
command.define_config()


def main() -> None:
  evaluation = inference.evaluate_to_file(
    command.load_config(), workdir=WORKDIR.value, model=MODEL.value, output=OUTPUT.value
  )
  print(report.evaluation_table(evaluation))


if __name__ == '__main__':
  command.run(main)
