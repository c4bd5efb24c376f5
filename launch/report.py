"""Writes an HTML page about a run: curves, evaluations, rollouts.

  python -m launch.report --workdir=runs/mine
  python -m launch.report --workdir=runs/sdpo_0 --compare runs/sdpo_1 runs/grpo_0 runs/grpo_1 --output=report.html
  python -m launch.report --workdir=runs/mine --no_texts --output=public.html
  python -m launch.report --workdir=runs/mine --follow

It also shows speed, alarms, and the tokens of every rollout. The page needs no server and contacts none. It can be
published: it has only the last component of paths and no addresses, and --no_texts leaves out prompts, completions and
feedback. Runs that differ only in their seed are one curve with a band. With --follow it is rewritten while the run is
in progress, and reloads itself. See docs/report.md.
"""

from absl import flags

from sdpo_jax import command

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a run, local or gs://.', required=True)
COMPARE = command.define_list('compare', 'Directories of other runs to show beside it, such as --compare DIR DIR')
OUTPUT = flags.DEFINE_string('output', None, 'File for the page; by default report.html in --workdir.')
MAX_ROLLOUTS = flags.DEFINE_integer('max_rollouts', 10_000, 'Maximum number of rollouts on the page.', lower_bound=0)
MAX_MB = flags.DEFINE_float('max_mb', None, 'Maximum megabytes of the page; 25 if unset.', lower_bound=1)
NO_TEXTS = flags.DEFINE_bool('no_texts', False, 'Leave out prompts, completions, feedback and templates.')
FOLLOW = flags.DEFINE_bool('follow', False, 'Rewrite the page while the run is in progress, until it ends or Ctrl-C.')
INTERVAL_S = flags.DEFINE_float('interval_s', 10.0, 'Seconds between two updates with --follow.', 1.0)


def main() -> None:
  """Write the page, with --follow again and again until the run ends."""
  from sdpo_jax.reporting import report

  report.write_report(
    WORKDIR.value,
    COMPARE.value,
    OUTPUT.value,
    max_rollouts=MAX_ROLLOUTS.value,
    max_mb=MAX_MB.value or report.MAX_MB,
    texts=not NO_TEXTS.value,
    follow_s=INTERVAL_S.value if FOLLOW.value else None,
    say=command.announce,
  )


if __name__ == '__main__':
  command.run(main)
