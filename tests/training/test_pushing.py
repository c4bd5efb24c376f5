"""Slots on their way to a service: the newest arrive, in order; a service that fails ends no run."""

import dataclasses
import logging

import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.cartridge_files import Origin
from sdpo_jax.training.pushing import ADAPTERS, Pushing
from tests.push_server import push_server

SLOTS = Cartridge(np.zeros((1, 1, 2, 4), np.float32), np.ones((1, 1, 2, 4), np.float32), 0)


@pytest.fixture
def server():
  with push_server() as opened:
    yield opened


def pushing(server, **changes):
  config = Config(name='mine')
  config.trainer.push_url = server.address
  for name, value in changes.items():
    setattr(config.trainer, name, value)
  return Pushing(config, Origin('model', {}, {'file': 'digest'}))


def test_each_step_is_a_version_of_the_cartridge_with_the_name_of_the_run(server, monkeypatch):
  monkeypatch.setenv('SERVICE_KEY', 'sk-1')
  made = pushing(server, push_key_env='SERVICE_KEY')
  for step in (1, 2):
    made.send(SLOTS, step)
    made._thread.join()  # noqa: SLF001 (Sent one by one.)
  made.close()
  assert server.kept == [{'run': 'mine', 'step': '1'}, {'run': 'mine', 'step': '2'}]
  asked = [('GET', '/v1/models/mine'), ('POST', f'{ADAPTERS}/import?name=mine'), ('POST', f'{ADAPTERS}/ad-1/versions')]
  assert server.paths == asked and server.keys == {'Bearer sk-1'}
  again = pushing(server, push_name='mine')  # After a resume.
  again.send(SLOTS, 3)
  again.close()
  assert server.paths[3:] == [asked[0], asked[2]]


def test_while_one_is_sent_only_the_newest_waits(server):
  made = pushing(server)
  server.open.clear()
  for step in range(1, 6):
    made.send(SLOTS, step)
  while not server.paths:  # The first is under way.
    pass
  server.open.set()
  made.close()
  steps = [int(each['step']) for each in server.kept]
  assert steps[-1] == 5 and len(steps) <= 3 and steps == sorted(steps)


def test_a_service_that_fails_is_named_once_until_it_works_again(server, caplog):
  caplog.set_level(logging.INFO, 'sdpo_jax.training')
  made = pushing(server)

  def send(step):
    made.send(SLOTS, step)
    if (thread := made._thread) is not None:  # noqa: SLF001
      thread.join()

  send(1)
  for status, steps in ((500, (2, 3)), (200, (4,)), (401, (5,))):
    server.status = status
    for step in steps:
      send(step)
  server.status, server.known = 200, False  # It was deleted there.
  send(6)
  send(7)
  made.close()
  assert [each['step'] for each in server.kept] == ['1', '4', '7']
  warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
  assert [message.partition(' could')[0] for message in warnings] == [
    'The slots of step 2',
    'The slots of step 5',
  ]
  assert all(part in warnings[0] for part in ('status 500', 'and later ones are tried', '127.0.0.1'))
  assert sum('again' in record.getMessage() for record in caplog.records) == 2


def test_slots_that_cannot_be_sent_and_answers_of_others_do_not_end_the_sending(server, monkeypatch):
  made = pushing(server, push_name='mine#2')

  def send(step, slots=SLOTS):
    made.send(slots, step)
    if (thread := made._thread) is not None:  # noqa: SLF001
      thread.join()

  send(1, dataclasses.replace(SLOTS, keys=np.full_like(SLOTS.keys, np.nan)))
  with monkeypatch.context() as patched:
    patched.setattr(server, 'answer', lambda *_: (200, ['no service']))
    send(2)
  send(3)
  made.close()
  assert [each['step'] for each in server.kept] == ['3']
  assert server.paths[-2:] == [('GET', '/v1/models/mine%232'), ('POST', f'{ADAPTERS}/import?name=mine%232')]


def test_what_can_never_be_sent_is_said_at_the_start(server):
  with pytest.raises(UserError, match='trainer.push_key_env=UNSET'):
    pushing(server, push_key_env='UNSET')
  with pytest.raises(UserError, match='trainer.push_url must be'):
    pushing(server, push_url='ftp://host')
  config = Config()
  config.trainer.push_url = server.address
  with pytest.raises(UserError, match='trainer.push_url'):
    config.validate()
