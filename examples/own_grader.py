"""Your own questions and your own grader: train, monitor, evaluate, ask and export.

  python examples/own_grader.py --workdir=runs/own_grader

The tiny model of the quickstart learns to reverse digits; the grader describes the errors in words, and the model
learns from this feedback. The words are those of `sdpo_jax/environments/digits.py`: so small a model reads no others.
40 steps take about a minute on two CPU cores, and lead from almost no right answer to almost only right ones.
"""

import argparse

import sdpo_jax

ROWS = [{'prompt': f'Reverse the digits: {number}', 'answer': str(number)[::-1]} for number in range(10000, 20000, 13)]


def reversal(completions, answer, **_):
  """Score completions, with feedback on which digit of a wrong one is wrong."""

  def outcome(said, right):
    pairs = enumerate(zip(right, said, strict=False), 1)
    wrong = [f'Digit {at} is wrong: expected {digit}, got {got}.' for at, (digit, got) in pairs if got != digit]
    return {'score': float(said == right), 'feedback': '\n'.join(wrong)}

  return [outcome(said.strip(), right) for said, right in zip(completions, answer, strict=True)]


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--workdir', default='runs/own_grader')
  parser.add_argument('--steps', type=int, default=40)
  arguments = parser.parse_args()

  config = sdpo_jax.load_config('configs/quickstart.py')
  config.trainer.total_training_steps = arguments.steps
  config.trainer.test_freq = arguments.steps
  config.trainer.save_freq = arguments.steps

  def look(step: sdpo_jax.Step) -> None:
    [answer] = step.sample('Reverse the digits: 12345', temperature=0)
    print(f'step {step.number}: score {step.metrics["rollout/score_mean"]:.2f}, 12345 becomes {answer}')

  held_out = ROWS[::10]
  rows = [row for row in ROWS if row not in held_out]
  sdpo_jax.train(config, arguments.workdir, rows=rows, held_out=held_out, grader=reversal, on_step=look)

  lines = sdpo_jax.read_metrics(arguments.workdir)
  first, last = lines[0], lines[-1]
  for name in ('eval/held_out/mean@4', 'eval/held_out/best@4'):
    print(f'{name}: {first[name]:.1%} before, {last[name]:.1%} after {last["step"]} steps')
  print(sdpo_jax.generator(arguments.workdir, temperature=0).generate('Reverse the digits: 98761'))


if __name__ == '__main__':
  main()
