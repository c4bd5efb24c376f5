"""A question beside which the teacher can be shown nothing is found before a run, and by the teacher itself."""

import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.teacher import context
from sdpo_jax.training import room
from sdpo_jax.training.specs import objective_spec
from sdpo_jax.types import Example, Outcome
from tests.golden.tokenizer import CharacterTokenizer

SPEC = objective_spec(Config())  # Of a teacher that is re-prompted.


def question(length):
  return Example(f'q{length}', [{'role': 'user', 'content': 'Q' * length}], 'e', None, 's', {'origin': f'row {length}'})


def settings(**changes):
  config = Config()
  config.data.max_prompt_length = 380
  config.actor.self_distillation.max_reprompt_len = 400
  for key, value in changes.items():
    setattr(config.actor.self_distillation, key, value)
  return config


def teach(length, config):
  """Every kind of teacher's prompt of a question: of a success and two failures, and of a failure alone."""
  for texts, scores in ((['right' * 9, 'wrong' * 9, 'also wrong'], [1, 0, 0]), (['wrong' * 9], [0])):
    context.build_teacher_context(
      [question(length).messages] * len(texts),
      [0] * len(texts),
      texts,
      [Outcome(float(score), 'because of this' * (1 - score)) for score in scores],
      config.actor.self_distillation,
      CharacterTokenizer(),
      seed=0,
      step=0,
    )


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'include_demonstration': False},
    {'include_environment_feedback': False},
    {'include_failed_attempt': True},
    {'environment_feedback_only_without_solution': False},
  ],
)
def test_what_would_end_a_run_is_known_to_the_last_token(changes):
  """The longest question that the teacher takes is the longest that is let through."""
  config = settings(**changes)

  def fails(function, *arguments):
    try:
      function(*arguments)
    except UserError as error:
      assert 'leaves no room' in str(error)
      return True
    return False

  longest = max(length for length in range(100, 380) if not fails(teach, length, config))
  assert 100 < longest < 379
  room.check_room(CharacterTokenizer(), [question(20), question(longest)], config, SPEC)
  with pytest.raises(UserError, match=f'^row {longest + 1}: .* leaves no room for a demonstration or feedback: raise'):
    room.check_room(CharacterTokenizer(), [question(20), question(longest + 1)], config, SPEC)


def test_no_question_is_looked_at_where_there_is_room_for_the_longest():
  room.check_room(CharacterTokenizer(), [None], settings(max_reprompt_len=1000), SPEC)
  room.check_room(CharacterTokenizer(), [None], settings(reprompt_truncation='right'), SPEC)
  config = settings()
  config.actor.policy_loss.loss_mode = 'vanilla'
  room.check_room(CharacterTokenizer(), [None], config, objective_spec(config))


def test_a_writer_of_feedback_has_room_for_some_question():
  config = settings(feedback_model='self', feedback_max_prompt_len=300)
  examples, chat = [question(1000), question(500)], CharacterTokenizer()
  with pytest.raises(UserError, match='^row 1000, as .* more than .*feedback_max_prompt_len=300, and no other'):
    room.check_writer(chat, examples, config, SPEC)
  room.check_writer(chat, [*examples, question(2)], config, SPEC)
  room.check_writer(chat, examples, settings(), SPEC)
  config = settings(feedback_model='self', max_reprompt_len=300)
  with pytest.raises(UserError, match='self_distillation.max_reprompt_len=300, and no other question fits either'):
    room.check_writer(chat, examples, config, SPEC)
