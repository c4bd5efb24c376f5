"""Measures before training whether there is something to distil.

  python -m launch.probe --config=configs/quickstart.py
  python -m launch.probe --config=configs/quickstart.py --max_questions=32 --output=probe.json
  python -m launch.probe --config=configs/quickstart_lora.py --adapter=DIR

Asks held-out questions: how often the student is right, how often the same model is once it reads a demonstration,
feedback or both, how many questions carry a signal, and what does not fit the configured lengths. Recommends what to
do about it. See docs/probe.md.
"""

from absl import flags

from sdpo_jax import command

OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the numbers and the recommendation.')
OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace an --output that already exists.')
MAX_QUESTIONS = flags.DEFINE_integer(
  'max_questions', 128, 'Questions at most, a seeded draw from the held-out ones.', lower_bound=1
)
command.define_config()
command.define_adapter('The model is probed with it.')


def main() -> None:
  """Probe the model, write the measurements to --output, and print them with the advice that follows."""
  from sdpo_jax.inference import probe, probe_report

  numbers, advice = probe.probe_to_file(
    command.load_config(),
    output=OUTPUT.value,
    max_questions=MAX_QUESTIONS.value,
    overwrite=OVERWRITE.value,
    announce=command.announce,
  )
  print(probe_report.summary(numbers, advice))


if __name__ == '__main__':
  command.run(main)
