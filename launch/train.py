"""Trains a policy with SDPO (or GRPO), or resumes a run.

  python -m launch.train --config=configs/quickstart.py
  python -m launch.train --config=configs/quickstart.py --workdir=runs/mine --config.optimizer.lr=1e-4
  python -m launch.train --config=configs/quickstart_lora.py --workdir=runs/more --adapter=DIR

The same command with the same --workdir continues where the run stopped. --help_settings lists every setting,
--help_settings=teacher the settings of a section or those that mention a word.

Exit codes: 0 done; 2 bad input, or too many skipped steps (trainer.max_skipped_steps), named in a sentence; 3 stopped
by an alarm (alarms.rules), with a checkpoint; 70 no progress for too long (trainer.watchdog_limit_s); 75 one of several
processes was lost or never joined, named in a sentence; 130 interrupted for a second time, or before the run began; 143
stopped by SIGTERM or Ctrl-C, after saving the last finished step within trainer.preemption_grace_s. After 70, 75, 130
and 143 the same command resumes.
"""

from absl import flags

from sdpo_jax import command

WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Directory of the run, local or gs://; runs/<name of the config> if unset.'
)
RESTART = flags.DEFINE_bool(
  'restart',
  False,
  'Begin again at step 0 if a run has lost its checkpoints; what is left of it is moved to before_restart/<n> in the '
  '--workdir. If there is a checkpoint, the run resumes as usual.',
)
command.define_config()
command.define_adapter('Training continues from it, with its rank, alpha and matrices (model.lora.path).')
command.define_cartridge('Training continues from it, with its slots (model.cartridge.path).')
command.define_cluster()


def main() -> int:
  """Train, print the summary on process 0, and return the exit code."""
  import jax

  from sdpo_jax.training import closing_text, loop, preemption

  config = command.load_config()
  command.join_cluster()
  workdir = WORKDIR.value or f'runs/{config.name}'
  result = loop.train(config, workdir, restart=RESTART.value, announce=command.announce)
  if result.deadline is not None:
    preemption.end_by(result.deadline, result.exit_code)
  if jax.process_index() == 0:
    model = config.model
    trained = 'adapter' if model.lora.used else 'cartridge' if model.cartridge.used else 'model'
    print(closing_text.summary(result, flags.FLAGS.config, command.overrides(), trained=trained), flush=True)
  if result.stopped:
    return loop.EXIT_ALARM
  return result.exit_code


if __name__ == '__main__':
  command.run(main)
