"""What a feedback asks for is checked in one sentence each, and what it leaves out is as the service says."""

import dataclasses
import math

import numpy as np
import pytest

from sdpo_jax.config import LearningConfig, ServeConfig
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import AdamW, UpdateOptions
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import DETAILS, Item, choose_teacher, learning_of, make_request
from sdpo_jax.serving.records import AdapterRecord

ITEM = Item(sample_id='s')


def learning(update, topk=20, **changes):
  return learning_of(update, dataclasses.replace(LearningConfig(), **changes), topk)


def test_what_is_left_out_is_as_the_service_says():
  assert learning({}) == UpdateOptions(Sdpo(topk=20))
  assert learning({}, topk=5, alpha=0.25, is_clip=None, steps=3) == UpdateOptions(
    Sdpo(alpha=0.25, topk=5, is_clip=None), steps=3
  )
  assert learning({'alpha': None, 'is_clip': None}).loss == Sdpo(topk=20, is_clip=None)
  assert learning({}, loss='jsd_pg', jsd_weight=0.25).loss == JsdPg(jsd_weight=0.25)
  update = {'loss': 'jsd_pg', 'clip_eps': 0.1, 'max_grad_norm': None, 'beta1': 0.5, 'steps': 2}
  optimizer = AdamW(max_grad_norm=math.inf, beta1=0.5)
  assert learning(update) == UpdateOptions(JsdPg(clip_eps=0.1), optimizer, 2)


@pytest.mark.parametrize(('name', 'alpha'), [('forward_kl', 0.0), ('reverse_kl', 1.0), ('jsd', 0.5)])
def test_divergences_have_names(name, alpha):
  assert learning({'divergence': name}).loss.alpha == alpha
  assert learning({'divergence': name}, alpha=0.3).loss.alpha == alpha
  assert learning({'divergence': 'jsd', 'alpha': 0.3}).loss.alpha == 0.3


@pytest.mark.parametrize(
  ('update', 'said'),
  [
    ({'loss': 'grpo'}, "loss must be 'sdpo' or 'jsd_pg', not 'grpo'"),
    ({'lr': 1}, "'lr' cannot be set"),
    ({'clip_eps': 0.1}, "'clip_eps' cannot be set with loss='sdpo'"),
    ({'loss': 'jsd_pg', 'topk': 3}, "'topk' cannot be set with loss='jsd_pg'"),
    ({'learning_rate': -1}, 'learning_rate must be 0 or a positive number'),
    ({'learning_rate': math.nan}, 'learning_rate must be a number'),
    ({'learning_rate': 10**400}, r'learning_rate=10+\.\.\.0+ is too large'),
    ({'divergence': []}, 'divergence must be one of'),
    ({'learning_rate': '1'}, "learning_rate must be a number, not '1'"),
    ({'learning_rate': True}, 'learning_rate must be a number'),
    ({'beta1': 1}, 'beta1 must be 0 or more and less than 1'),
    ({'eps': 0}, 'eps must be a positive number'),
    ({'weight_decay': math.inf}, 'weight_decay must be 0 or a positive number'),
    ({'max_grad_norm': 0}, 'max_grad_norm must be positive'),
    ({'alpha': 1.5}, 'alpha'),
    ({'topk': 21}, 'topk=21 is more than the 20'),
    ({'topk': 0}, 'topk'),
    ({'topk': 10**400}, r'topk=10+\.\.\.0+ is more than the 20'),
    ({'divergence': 'kl'}, 'divergence must be one of'),
    ({'divergence': 'forward_kl', 'alpha': 0.5}, 'contradict each other'),
    ({'divergence': 'jsd', 'alpha': 0}, 'contradict each other'),
    ({'is_clip': 0}, 'is_clip must be positive'),
    ({'steps': 1.5}, 'steps must be a whole number'),
    ({'loss': 'jsd_pg', 'form': 'design', 'alpha': 0.25}, 'reinforce'),
    ({'loss': 'jsd_pg', 'clip_eps': 0}, 'clip_eps'),
    ({'loss': 'jsd_pg', 'jsd_weight': math.nan}, 'jsd_weight must be a number'),
  ],
)
def test_what_cannot_be_learned_with_is_refused_by_name(update, said):
  with pytest.raises(InvalidRequest, match=said):
    learning(update)


def test_a_reward_turns_the_policy_gradient_on():
  serve = ServeConfig()
  assert make_request([ITEM], {}, serve).update.loss.policy_weight == 0
  rewarded = dataclasses.replace(ITEM, reward=1.0)
  assert make_request([rewarded], {}, serve).update.loss.policy_weight == 1.0
  assert make_request([rewarded], {'policy_weight': 0.5}, serve).update.loss.policy_weight == 0.5
  for update in ({'policy_weight': 0}, {'loss': 'jsd_pg'}):
    with pytest.raises(InvalidRequest, match='A reward requires the policy gradient'):
      make_request([rewarded], update, serve)


@pytest.mark.parametrize(
  ('items', 'more', 'said'),
  [
    ([], {}, '1 to 64 completions .*, not 0'),
    ([ITEM] * 65, {}, '1 to 64 completions .*, not 65'),
    ([Item()], {}, r'items\[0\] must have either a sample_id, or prompt_tokens and tokens'),
    ([ITEM, Item(prompt_tokens=[1])], {}, r'items\[1\] must have either'),
    ([Item(sample_id='s', prompt_tokens=[1], tokens=[2])], {}, 'must have either'),
    ([dataclasses.replace(ITEM, log_probs=np.zeros(1))], {}, 'leave them out'),
    ([Item(prompt_tokens=[1], tokens=[2, 3], log_probs=np.zeros(1))], {}, 'one number for each of the 2 tokens'),
    ([Item(prompt_tokens=[1], tokens=[2], log_probs=np.array([np.nan]))], {}, 'one number for each'),
    ([Item(prompt_tokens=[1], tokens=[2], log_probs=np.array([0.1]))], {}, 'at most 0'),
    ([dataclasses.replace(ITEM, reward=math.inf)], {}, 'reward must be a number'),
    ([ITEM], {'mode': 'try'}, "mode must be 'commit' or 'dry_run'"),
    ([ITEM], {'detail': ('logits',)}, "detail must be among .*, not 'logits'"),
    ([ITEM], {'top': 21}, 'top must be between 0 and 20'),
  ],
)
def test_items_that_are_none_are_refused_by_number(items, more, said):
  with pytest.raises(InvalidRequest, match=said):
    make_request(items, {}, ServeConfig(), **more)
  assert make_request([ITEM], {}, ServeConfig()).detail == DETAILS


def test_steps_have_a_limit():
  with pytest.raises(InvalidRequest, match='steps must be between 1 and 16, not 17'):
    make_request([ITEM], {'steps': 17}, ServeConfig())
  with pytest.raises(InvalidRequest, match='steps must be between 1 and 16, not a int that is too large'):
    make_request([ITEM], {'steps': 10**5000}, ServeConfig())


def adapter(head, **settings):
  return AdapterRecord('a', 'ada', 'name', head, 0.0, settings)


def test_teachers_are_named_as_the_engine_knows_them():
  defaults = LearningConfig()

  def name(head=5, asked=None, **settings):
    return choose_teacher(adapter(head, **settings), asked, defaults).name

  assert name() == 'live' and name(teacher={'kind': 'base'}) == 'base' and name(teacher={'kind': 'ema'}) == 'average'
  assert name(teacher={'kind': 'frozen'}) == 'version:a@0'
  assert name(teacher={'kind': 'lagged', 'every': 2}) == 'version:a@3'
  assert name(teacher={'kind': 'lagged', 'every': 9}) == 'version:a@0'
  assert name(head=20, teacher={'kind': 'lagged'}) == f'version:a@{20 - defaults.lag}'
  assert name(teacher={'kind': 'lagged', 'version': 4}) == 'version:a@4'
  assert name(asked={'kind': 'model', 'name': 'large'}, teacher={'kind': 'base'}) == 'model:large'
  ema = adapter(1, teacher={'kind': 'ema', 'rate': 0.5})
  assert choose_teacher(ema, None, defaults).average_rate == 0.5
  # The average moves on by the adapter's rate whoever teaches this time.
  assert choose_teacher(ema, {'kind': 'live'}, defaults).average_rate == 0.5
  # There is no average where neither the adapter nor the request has one for a teacher.
  assert choose_teacher(adapter(1), None, defaults).average_rate is None
  assert choose_teacher(adapter(1), {'kind': 'ema'}, defaults).average_rate == defaults.average_rate


@pytest.mark.parametrize(
  ('settings', 'said'),
  [
    ({}, 'kind must be one of'),
    ({'kind': 'wise'}, "not 'wise'"),
    ({'kind': ['live']}, r"not \['live'\]"),
    ({'kind': {}}, 'not {}'),
    ({'kind': 'lagged', 'version': 10**5000}, 'too large to be shown cannot teach'),
    ({'kind': 'base', 'rate': 0.1}, "has no setting 'rate'"),
    ({'kind': 'ema', 'rate': 2}, 'rate must be between 0 and 1'),
    ({'kind': 'lagged', 'every': 0}, 'every must be a whole number of 1 or more'),
    ({'kind': 'lagged', 'version': 1.0}, 'version must be a whole number'),
    ({'kind': 'lagged', 'every': 1, 'version': 1}, 'leave one out'),
    ({'kind': 'lagged', 'version': 6}, 'the newest version is 5'),
    ({'kind': 'model'}, 'needs the name'),
  ],
)
def test_teachers_that_are_none_are_refused(settings, said):
  with pytest.raises(InvalidRequest, match=said):
    choose_teacher(adapter(5, teacher={'kind': 'live'}), settings, LearningConfig())
