"""Checks a run in seconds, before it starts.

  python -m launch.check --config=configs/quickstart.py
  python -m launch.check --config=configs/quickstart.py --workdir=runs/quickstart

Nothing is compiled and no weights are read. Prints devices, parameters and an estimate of memory, the lengths of
prompts against the limits, the graders' verdicts on ground truths and on empty answers, three prompts of student and
teacher with special tokens in ⟦ ⟧, and what looks odd: settings that contradict each other, the data, the graders or
the memory of the devices. With the --workdir of a run that will be resumed, it also prints what has changed since the
run was saved: tokenizer, data, graders, versions, settings.

Exit codes: 0 nothing looks odd; 1 something does, but the run would start, unless the output says that it ends at its
start; 2 bad input, named in a sentence.
"""

from absl import flags

from sdpo_jax import command

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a run that will be resumed; nothing is written there.')
command.define_config()
command.define_adapter('As in launch.train; its weights and those of the model are not compared.')
command.define_cluster()
ODD = 1  # Exit code if something looks odd.


def main() -> int:
  """Print the report; return `ODD` if something in it looks odd."""
  import jax

  from sdpo_jax.preflight import check

  config = command.load_config()
  command.join_cluster()
  report = check.check(config, WORKDIR.value)
  if jax.process_index() == 0:
    print(report.text())
  return ODD if report.odd else 0


if __name__ == '__main__':
  command.run(main)
