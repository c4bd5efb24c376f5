"""Checks a run before it starts, in seconds: nothing is compiled, no weights are read.

  python -m launch.check --config=configs/quickstart.py

Prints devices, parameters and an estimate of memory, the lengths of prompts against the limits, what the graders say
of ground truths and of empty answers, three prompts of student and teacher with special tokens in ⟦ ⟧, and what looks
odd: settings that contradict each other, the data, the graders or the memory of the devices.

Exit codes: 0 nothing looks odd; 1 something does, and the run would start all the same; 2 bad input, named in a sentence.
"""

import jax

from sdpo_jax import command
from sdpo_jax.preflight import check

command.define_config()
command.define_cluster()
ODD = 1


def main() -> int:
  config = command.load_config()
  command.join_cluster()
  report = check.check(config)
  if jax.process_index() == 0:
    print(report.text())
  return ODD if report.odd else 0


if __name__ == '__main__':
  command.run(main)
