"""A whole service in this process: the tiny model with an adapter, its engine, and a store in a folder."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import pathlib

import jax

from sdpo_jax.config import Config
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.sample_requests import SampleOptions
from sdpo_jax.serving.service import Service
from tests import compiling, tiny
from tests.serving.store import places

WIDE = 100  # K.
SLOTS = 16  # The most of a cartridge.
HELLO = [{'role': 'user', 'content': 'Hi'}]


def make_config(model: pathlib.Path, root: pathlib.Path) -> Config:
  """Return the settings of a service with small buckets, of the model that `tiny.make_model` made.

  All files of tests have the same sizes, so that the first one compiles for all.
  """
  config = Config(name='service')
  config.model.path, config.model.dtype, config.model.remat = str(model), 'float32', 'none'
  config.model.lora.rank, config.model.lora.alpha = 2, 4.0
  serve = config.serve
  serve.prompt_buckets, serve.teacher_buckets, serve.response_buckets = (64,), (256,), (8,)
  serve.rows, serve.training_rows, serve.snapshots, serve.teachers, serve.slots = 4, 2, 3, 3, 2
  serve.cartridges, serve.cartridge_slots = 2, SLOTS
  serve.topk, serve.decode_chunk, serve.model_name = WIDE, 3, 'tiny'
  serve.score_buckets = (320,)  # As long as what teachers are asked about at the start of a run.
  if places.replicated():
    serve.store.root, serve.store.database = places.places(root)
    serve.http.url = 'http://localhost'
  else:
    serve.store.root = str(root)
  serve.programs = str(compiling.commands_cache().parent / 'engine')
  serve.learning.learning_rate = 1e-2
  return config


@contextlib.contextmanager
def running(config: Config, devices: int = 1) -> Iterator[Service]:
  """Give a service on so many devices that is ready, and stop it."""
  service = Service.make(config, announce=lambda line: None, devices=jax.devices()[:devices])
  try:
    service.start()
    service.worker.wait()
    yield service
  finally:
    service.stop()


def model_folder(folder: pathlib.Path) -> pathlib.Path:
  """Make the tiny model in a folder."""
  folder.mkdir(exist_ok=True)
  return tiny.make_model(folder)


def sample(account: Account, model: str, *, seed: int = 0, n: int = 1, **options):
  """Completions of a greeting."""
  prompt = account.service.prompt_of(messages=HELLO)
  return account.sample(
    account.resolve(model), prompt, n=n, options=SampleOptions(seed=seed, **options), messages=HELLO
  ).result()
