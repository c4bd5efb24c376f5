"""Compares runs: settings, metrics, curves, and noise over seeds.

  python -m launch.compare runs/sdpo_0 runs/sdpo_1 runs/grpo_0 runs/grpo_1
  python -m launch.compare runs/* --metric='eval/*/mean@4' --output=comparison.json

Prints the settings that differ, and for each metric whether the difference between arms is more than noise over seeds.
Runs that differ only in their seed, name and settings without effect on what is learned are seeds of one arm.
launch.report --compare draws the curves.
"""

from absl import flags

from sdpo_jax import command

RUNS = command.define_words('runs', 'Directories of runs, local or gs://…; the flag --runs itself may be left out.')
METRIC = flags.DEFINE_multi_string(
  'metric',
  [],
  'Metric to compare, or a pattern such as eval/*/mean@4; may be repeated. Unset: the headlines of evaluations.',
)
OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write the comparison to, local or gs://…')


def main() -> None:
  """Print the comparison, and write it to --output if set."""
  from sdpo_jax.reporting import comparison  # Takes seconds, which --help need not wait for.

  print(comparison.write_comparison(RUNS.value, METRIC.value, OUTPUT.value))


if __name__ == '__main__':
  command.run(main)
