"""Requests that come and go: each gets what it would get alone, whatever else is decoded beside it."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.models.adapters.lora_pool import LoraPool
from sdpo_jax.rollout.fair_queue import Payer
from sdpo_jax.rollout.resident import CancelledError, Resident, Weights
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.rollout.sampler import Sampler
from tests.letters import CONFIG, TOKENIZER, decode_text

MEMBERS, SAMPLES = 3, 3
SETTINGS = dict(prompt_buckets=(8, 24), response_buckets=(24,), max_batch_rows=4, decode_chunk=3, stop_token_ids=(30,))


@pytest.fixture(scope='module')
def model():
  """(policy of one adapter, base, factors of every member)."""
  config = ModelConfig(dtype='float32', lora=LoraConfig(rank=2, alpha=4.0))
  policy = huggingface.describe(CONFIG, config).on(None)
  table = policy.parameter_table()
  base = parameters.initialise(parameters.frozen(table), jax.random.key(1), 0.3)
  draw = np.random.default_rng(1)
  members = [
    parameters.map_table(
      lambda row: jnp.asarray(0.5 * draw.standard_normal(row.shape), jnp.float32), parameters.trainable(table)
    )
    for _ in range(MEMBERS)
  ]
  return policy, base, members


@pytest.fixture(scope='module')
def sampler(model):
  policy, _, _ = model
  return Sampler(dataclasses.replace(policy, adapter=LoraPool(policy.adapter, MEMBERS)), TOKENIZER, **SETTINGS)


@pytest.fixture(scope='module')
def pool(model):
  policy, _, members = model
  pool = lora_pool.empty(dataclasses.replace(policy, adapter=LoraPool(policy.adapter, MEMBERS)).parameter_table())
  for index, own in enumerate(members):
    pool = lora_pool.with_member(pool, index, own)
  return pool


@pytest.fixture
def resident(model, sampler, pool):
  return Resident(sampler, model[1], pool, stop_ids=4)


def requests(count, seed=0):
  """Yield requests that differ in all that requests can differ in: (prompt, member, further options)."""
  draw = np.random.default_rng(seed)
  for index in range(count):
    prompt = draw.integers(1, 29, draw.integers(1, 25)).tolist()
    options = dict(
      n=int(draw.integers(1, 4)),
      seed=int(draw.integers(1000)),
      step=int(draw.integers(3)),
      max_tokens=int(draw.integers(1, 25)),
      temperature=float(draw.choice([0.0, 0.8, 1.3])),
      top_p=float(draw.choice([1.0, 0.9])),
    )
    stops = dict(
      stop_token_ids=draw.integers(1, 29, draw.integers(0, 3)).tolist(), stop=['ab', 'c'][: draw.integers(0, 3)]
    )
    yield prompt, index % (MEMBERS + 1) - 1, options, stops


@pytest.fixture(scope='module')
def expected(model):
  """Return what a sampler that knows one adapter, or none, draws for a request alone.

  It draws as many samples as any request asks for, in programs for one number of rows: a sample knows of no other.
  """
  policy, base, members = model

  def draw(prompt, member, options, stops):
    its, own = (policy, members[member]) if member >= 0 else (policy.base_policy(), {})
    ends = {30, *stops['stop_token_ids']}
    ends |= set(range(-4, -len(ends)))  # Always four, for one program; no token is negative.
    alone = Sampler(its, TOKENIZER, **SETTINGS | dict(stop_token_ids=sorted(ends), stop=stops['stop']))
    assert options['n'] <= SAMPLES
    drawn = sorted(alone.stream(base, own, [prompt], **options | {'n': SAMPLES}), key=lambda done: done.sample)
    return drawn[: options['n']]

  return draw


def assert_same(found, expected):
  assert [done.sample for done in found] == [done.sample for done in expected]
  for one, other in zip(found, expected, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.stopped, one.text) == (other.stopped, other.text)
    for name in ('sampling_log_probs', 'model_log_probs', 'entropy'):
      np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=3e-5)


def test_requests_that_come_while_others_are_decoded_get_what_they_get_alone(resident, expected):
  asked = list(requests(7))
  handles = []
  for prompt, member, options, stops in asked:
    handles.append(resident.submit(prompt, weights=Weights(member), **stops, **options))
    resident.turn()
  while resident.turn():
    pass
  assert all(handle.done for handle in handles)
  for handle, request in zip(handles, asked, strict=True):
    assert_same(handle.result(), expected(*request))
  assert resident.stats.dispatches < sum(options['max_tokens'] for _, _, options, _ in asked) / 3


def test_a_flood_of_one_payer_does_not_hold_up_another_nor_change_what_either_gets(resident, expected):
  """The second gets one of the next slots, while 60 samples of the first wait before it."""
  options = dict(seed=5, step=0, max_tokens=12, temperature=1.0)
  flood = resident.submit([4, 5, 6], payer=Payer('loud'), n=60, **options)
  for _ in range(3):
    resident.turn()
  quiet = resident.submit([7, 8], payer=Payer('quiet'), n=1, **options)
  turns, none = 0, {'stop_token_ids': [], 'stop': []}
  while not quiet.done:
    resident.turn()
    turns += 1
  assert turns <= 2 * 12 / 3 + 2 and flood.left > 30  # One sample of each, of 12 tokens in chunks of 3.
  while resident.turn():
    pass
  assert_same(quiet.result(), expected([7, 8], -1, dict(n=1, **options), none))
  assert_same(flood.result()[:3], expected([4, 5, 6], -1, dict(n=3, **options), none))


def test_prompts_are_read_once_for_the_same_weights_alone(resident):
  prompt, options = [5, 6, 7], dict(n=3, seed=1, step=0, max_tokens=4)
  for version in ('a', 'a', 'b'):
    resident.submit(prompt, weights=Weights(0, version), **options)
  resident.submit(prompt, weights=Weights(1, 'a'), **options)
  while resident.turn():
    pass
  assert resident.stats.prompts == 3


def test_a_request_that_is_cancelled_leaves_the_others_as_they_are(resident, expected):
  asked = list(requests(5, seed=3))
  handles = [
    resident.submit(prompt, weights=Weights(member), **stops, **options) for prompt, member, options, stops in asked
  ]
  late = resident.submit([1, 2], n=50, seed=0, step=0, max_tokens=24)
  resident.turn()
  resident.cancel(handles[0])
  resident.cancel(late)
  while resident.turn():
    pass
  for handle in (handles[0], late):
    with pytest.raises(CancelledError):
      handle.result()
    with pytest.raises(CancelledError):  # Whoever asks again hears it again.
      handle.result()
  for handle, request in list(zip(handles, asked, strict=True))[1:]:
    assert_same(handle.result(), expected(*request))
  resident.cancel(handles[1])  # It is done: nothing happens.
  assert not resident.turn()


def test_drafts_grow_into_completions(resident):
  handle = resident.submit([4, 5], drafts=True, n=2, seed=3, step=0, max_tokens=24, temperature=1.0)
  quiet = resident.submit([4, 5], n=1, seed=3, step=0, max_tokens=24, temperature=1.0)
  while resident.turn():
    pass
  seen = {0: [], 1: []}
  for event in handle:
    if isinstance(event, Draft):
      assert len(event.tokens) > len(seen[event.sample])
    assert event.tokens[: len(seen[event.sample])].tolist() == seen[event.sample]
    seen[event.sample] = event.tokens.tolist()
  assert all(isinstance(event, Completion) for event in quiet)


def test_other_weights_take_over_between_two_turns(model, resident, pool, expected):
  prompt, options, stops = [3, 9, 4], dict(n=1, seed=3, step=0, max_tokens=20), dict(stop_token_ids=[], stop=[])
  first = resident.submit(prompt, weights=Weights(1, 'old'), **options)
  resident.turn()
  # Member 2, which no request has, gets the factors of member 0.
  resident.use(lora_pool.with_member(pool, 2, model[2][0]))
  second = resident.submit(prompt, weights=Weights(2, 'new'), **options)
  while resident.turn():
    pass
  assert_same(first.result(), expected(prompt, 1, options, stops))
  assert_same(second.result(), expected(prompt, 0, options, stops))


@pytest.mark.slow
def test_threads_submit_while_one_turns(resident, expected):
  asked, found, failures = list(requests(8, seed=5)), {}, []
  done = threading.Event()

  def drive():
    try:
      while not done.is_set():
        if not resident.turn():
          time.sleep(0.01)
    except BaseException as error:
      failures.append(error)
      raise

  def ask(index):
    prompt, member, options, stops = asked[index]
    found[index] = resident.submit(prompt, weights=Weights(member), **stops, **options).result()

  driver = threading.Thread(target=drive)
  clients = [threading.Thread(target=ask, args=(index,)) for index in range(len(asked))]
  for thread in (driver, *clients):
    thread.start()
  for thread in clients:
    thread.join(120)
  done.set()
  driver.join(120)
  assert not failures and len(found) == len(asked)
  for index, request in enumerate(asked):
    assert_same(found[index], expected(*request))


def test_what_ends_the_sampler_reaches_all_who_wait_and_all_who_come(model):
  def fail(*arguments, **settings):
    raise RuntimeError('the device is gone')

  policy, base, members = model
  keep = {'advance': fail}.get
  resident = Resident(Sampler(policy, TOKENIZER, **SETTINGS, keep=keep), base, members[0], stop_ids=4)
  handle = resident.submit([1, 2], n=1, seed=0, step=0, max_tokens=4)
  with pytest.raises(RuntimeError, match='is gone'):
    resident.turn()
  with pytest.raises(RuntimeError, match='is gone'):
    handle.result()
  with pytest.raises(RuntimeError, match='is gone'):
    resident.submit([1, 2], n=1, seed=0, step=0, max_tokens=4)


@pytest.mark.parametrize(
  'prompt, more, said',
  [
    ([], {}, 'is empty'),
    ([1] * 25, {}, 'has 25 tokens'),
    ([1], dict(max_tokens=25), 'max_tokens=25 is more'),
    ([1], dict(stop=['']), 'stop string is empty'),
    ([1], dict(stop_token_ids=range(4)), '5 stop tokens are more than the limit of 4'),
  ],
)
def test_a_request_that_cannot_be_is_refused_when_it_is_made(resident, prompt, more, said):
  with pytest.raises(UserError, match=said):
    resident.submit(prompt, **dict(n=1, seed=0, step=0, max_tokens=4) | more)
  assert not resident.turn() and decode_text([1]) == 'a'
