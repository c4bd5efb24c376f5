"""What is left of paths, addresses and texts when they are published."""

import pytest

from sdpo_jax.config import Config
from sdpo_jax.config.fields import flatten
from sdpo_jax.config.locations import is_hub_name
from sdpo_jax.config.privacy import FILES, MODELS, public_place, public_settings, public_text


@pytest.mark.parametrize(
  ('place', 'shown'),
  [
    ('/home/alice/models/base/', 'base'),
    ('/home/alice x/rows 1.jsonl', 'rows 1.jsonl'),
    ('~/base', 'base'),
    ('../alice/base', 'base'),
    ('alice/data/rows.jsonl', 'rows.jsonl'),
    ('base', 'base'),
    ('Qwen/Qwen3-8B', 'Qwen/Qwen3-8B'),
    ('configs/quickstart_model', 'quickstart_model'),  # A folder here, and so no name on the hub.
    ('gs://alice/models/base', 'base'),
    ('gs://alice', 'gs://…'),
    ('hf:me/rows?split=test[:5]', 'hf:me/rows?split=test[:5]'),
    ('hf:/home/alice/rows?split=test', 'hf:rows?split=test'),
    ('generator:facts?document=/home/alice/facts.txt&shown=no', 'generator:facts?document=facts.txt&shown=no'),
    ('http://alice:pass@10.0.0.3:8000/v1', 'http://…'),
    ('', ''),
    ('/', ''),
  ],
)
def test_of_a_place_its_last_name_is_shown(place, shown):
  assert public_place(place) == shown


@pytest.mark.parametrize(
  ('text', 'shown'),
  [
    ('see /home/alice/x.py:3, ok', 'see x.py:3, ok'),
    ("'~alice/a/b' and (./c/d) or ../e", "'b' and (d) or e"),
    ('--dump=/tmp/alice/x --at=/a/b:/c/d', '--dump=x --at=d'),
    ('at https://alice.internal:8000/v1?key=1 and s3://alice/x?key=1', 'at https://… and x'),
    ('postgresql://alice@host/db', 'db'),
    ('/no_think a/b </think> and/or 1/2 {prompt}/{answer}', '/no_think a/b </think> and/or 1/2 {prompt}/{answer}'),
    ('eval/*/mean@16 < 0.7 * best', 'eval/*/mean@16 < 0.7 * best'),
  ],
)
def test_of_a_text_only_paths_and_addresses_change(text, shown):
  assert public_text(text) == shown


def test_the_settings_that_are_places_exist_and_defaults_stay_as_they_are():
  defaults = flatten(Config())
  assert {*MODELS, *FILES} <= defaults.keys()
  changed = {name for name, value in public_settings(defaults).items() if value != defaults[name]}
  assert changed == {'serve.store.root'}  # A folder, runs/service.
  assert public_settings({'serve.http.host': 'gpu-7.alice.internal'}) == {'serve.http.host': '…'}


def test_names_on_the_hub_have_one_slash_and_no_folder():
  assert [
    name for name in ('a/b', './b', 'a/b/c', 'a', '/a', 'a/', 'tests/b', 'gs://a', 'a b/c') if is_hub_name(name)
  ] == ['a/b']
