"""Sessions on a real engine and a real store: what is proposed, decided and learned, once and for all."""

import numpy as np
import pytest

from sdpo_jax.serving.sessions.records import Decision
from sdpo_jax.serving.sessions.settings import SessionSettings
from tests.session_world import GREP, READ, TOOLS, called, world

HI = [{'role': 'user', 'content': 'Hi'}]


@pytest.fixture(scope='module')
def running_world(tmp_path_factory):
  with world(tmp_path_factory.mktemp('sessions')) as made:
    yield made


@pytest.fixture
def script(running_world):
  yield running_world[1]
  assert not running_world[1]._texts  # Everything was asked for.


@pytest.fixture
def ada(running_world, request):
  """An owner without adapters."""
  return running_world[0].account(f'ada of {request.node.name}')


def opened(account, **settings):
  """An adapter with a session."""
  adapter, _ = account.create('one', seed=0)
  session, _ = account.sessions.open(adapter.id, SessionSettings.from_json({'tools': TOOLS, **settings}))
  return adapter.id, session.id


def test_a_denied_proposal_is_learned_and_the_next_one_is_the_new_versions(ada, script):
  adapter, session = opened(ada)
  script.say(called(GREP), called(READ))
  first = ada.sessions.propose(adapter, session, HI).result()
  assert first.status == 'open' and [call.name for call in first.calls] == ['g'] and first.version == 0
  turn, learned = ada.sessions.decide(adapter, session, 0, Decision('deny', 'Use r.'))
  assert turn.status == 'denied' and learned.accepted and learned.turns == (0,) and turn.learned == learned
  assert (learned.version_before, learned.version_after) == (0, 1) and ada.adapter(adapter).head == 1
  assert learned.divergence_after < learned.divergence_before
  assert learned.moved and all(each.before != each.after for each in learned.moved)
  second = ada.sessions.propose(adapter, session).result()
  assert second.version == 1 and second.prompt_tokens == first.prompt_tokens and second.n == 1
  assert [version for version, _ in script.asked[-2:]] == [f'{adapter}@0', f'{adapter}@1']
  assert ada.version(adapter).details['session'] == {'id': session, 'turns': [0], 'examples': [[0, 'denial']]}
  assert [each.n for each in ada.sessions.turns(adapter, session)] == [0, 1]
  np.testing.assert_array_equal(ada.sessions.turns(adapter, session)[1].log_probs, second.log_probs)
