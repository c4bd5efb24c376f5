"""The hub is checked once, since its libraries would retry for half a minute; and pushes to it."""

import fnmatch
import http.server
import os
import subprocess
import sys
import threading
import types

import httpx2
from huggingface_hub import errors
import pytest

from sdpo_jax.data import sources
from sdpo_jax.errors import UserError
from sdpo_jax.models import hub, huggingface, model_files
from tests import hub_server


@pytest.fixture
def online(monkeypatch):
  """Let the libraries be online; the cached state of the hub is forgotten afterwards."""
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
  monkeypatch.setattr(hub, 'PAUSE_S', 0.0)
  hub.unreachable.cache_clear()
  yield
  hub.unreachable.cache_clear()


def ask_by(monkeypatch, head):
  """Let requests to the hub be answered by head(address)."""
  session = types.SimpleNamespace(head=lambda address, timeout: head(address))
  monkeypatch.setattr('huggingface_hub.get_session', lambda: session)


def test_a_hub_that_answers_is_reachable_whatever_it_says(online, monkeypatch):
  class Refusing(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
      self.send_error(503)

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Refusing) as server:
    threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', f'http://127.0.0.1:{server.server_address[1]}')
    assert hub.unreachable() is None
    server.shutdown()


@pytest.mark.parametrize(
  'kind, sentence',
  [
    (
      errors.GatedRepoError,
      r'grants access on request: ask for it at https://\S+/meta-llama/X, then run `hf auth login`',
    ),
    (errors.RepositoryNotFoundError, 'no such model, or it is private: correct the name, or run `hf auth login`'),
  ],
)
def test_a_model_that_is_not_for_everybody_is_said_with_the_way_to_it(kind, sentence, online, monkeypatch):
  """The first line of the library's message is only a status."""
  refused = kind(
    '401 Client Error.\n\nCannot access …', response=httpx2.Response(401, request=httpx2.Request('GET', 'x'))
  )

  def refuse(*_, **__):
    raise refused

  ask_by(monkeypatch, lambda address: None)
  monkeypatch.setattr('huggingface_hub.snapshot_download', refuse)
  with pytest.raises(UserError, match=sentence):
    hub.fetch('meta-llama/X', ['config.json'])


def test_a_hub_that_cannot_be_reached_is_said_at_once(online, monkeypatch):
  """For models and data sets: two attempts in total, and none by the libraries."""
  requests = []

  def unknown(address):
    requests.append(address)
    raise httpx2.ConnectError('Name or service not known')

  ask_by(monkeypatch, unknown)
  waits = types.SimpleNamespace(sleep=lambda seconds: pytest.fail('the library tries again'))
  monkeypatch.setattr('huggingface_hub.utils._http.time', waits)  # `time.sleep` itself is ours, too.
  with pytest.raises(
    UserError, match=r"'no/model' is not a directory here, and https://\S+ cannot be reached from here"
  ):
    huggingface.load('no/model', None)
  with pytest.raises(UserError, match=r"data.train_files='no/rows' is not a directory here, and .* cannot be reached"):
    sources.read_rows('hf:no/rows', 'data.train_files')
  assert len(requests) == hub.ATTEMPTS


def test_libraries_that_are_told_to_be_offline_are_not_second_guessed(online, monkeypatch):
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  ask_by(monkeypatch, lambda address: pytest.fail('the hub was asked'))
  assert hub.unreachable() is None


def test_weights_are_fetched_only_where_they_are_wanted(online, monkeypatch, tmp_path):
  """The library of the hub gets the patterns of files; of weights, only those that the index names."""
  companions = {'config.json', 'tokenizer.json', 'chat_template.jinja', 'model.safetensors.index.json'}
  names = {*companions, 'model-1.safetensors', 'consolidated.safetensors'}
  asked = []
  (tmp_path / 'config.json').write_text('{"model_type": "qwen3"}')
  (tmp_path / 'model.safetensors.index.json').write_text('{"weight_map": {"a": "model-1.safetensors"}}')
  ask_by(monkeypatch, lambda address: None)
  monkeypatch.setattr(huggingface.known_families, 'read', lambda values, source: None)

  def download(name, allow_patterns):
    asked.append({file for file in names if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns)})
    return str(tmp_path)

  monkeypatch.setattr('huggingface_hub.snapshot_download', download)
  assert model_files.resolve('some/model', weights=False) == tmp_path and asked == [companions]
  assert model_files.resolve('some/model') == tmp_path and asked[1:] == [
    companions,
    companions | {'model-1.safetensors'},
  ]


def test_weights_of_the_hub_that_cannot_be_used_are_not_fetched(online, monkeypatch, tmp_path):
  asked = []
  (tmp_path / 'config.json').write_text('{"model_type": "unheard_of"}')
  ask_by(monkeypatch, lambda address: None)
  monkeypatch.setattr(
    'huggingface_hub.snapshot_download', lambda name, allow_patterns: asked.append(allow_patterns) or str(tmp_path)
  )
  with pytest.raises(UserError, match="some/model/config.json: model_type 'unheard_of' is not supported"):
    model_files.resolve('some/model')
  assert len(asked) == 1


@pytest.fixture
def served(tmp_path, monkeypatch):
  with hub_server.reached(tmp_path, monkeypatch) as made:
    yield made


def write(folder, **files):
  folder.mkdir()
  for name, text in files.items():
    (folder / name.replace('_', '.', 1)).write_text(text)
  return {path.name: path.read_bytes() for path in folder.iterdir()}


CARD = '---\ntags:\n- jax\n---\n\n# A\n'


def test_what_is_pushed_is_the_directory_and_no_weights_of_an_earlier_one_stay(served, tmp_path):
  first = write(tmp_path / 'first', README_md=CARD, model_safetensors='\1' * 5000, config_json='{}', SHA256SUMS='')
  hub.check_push('me/x')
  hub.push(tmp_path / 'first', 'me/x', private=True)
  model = served.models['me/x']
  assert model.private and model.files == first
  assert any(path.startswith('/lfs/') for path in served.asked)  # Weights go another way than texts.
  mine = {'notes.md': b'mine', 'old/model.safetensors': b'mine', 'model-00001-of-00002.safetensors': b'old'}
  model.files |= mine | {'model.safetensors.index.json': b'{}', 'adapter_model.safetensors': b'old'}
  second = write(tmp_path / 'second', README_md=CARD, cartridge_safetensors='\2', cartridge_json='{}')
  hub.push(tmp_path / 'second', 'me/x', private=True)
  left = {name: content for name, content in mine.items() if not name.startswith('model')}
  assert model.files == second | left | {'SHA256SUMS': b''}


def test_what_is_to_be_private_is_not_put_where_everybody_sees_it(served, tmp_path):
  write(tmp_path / 'my out', README_md=CARD)
  served.models['me/x'] = hub_server.Model(private=False)
  with pytest.raises(
    UserError, match=r"--push=me/x: it exists and is public: .*`hf upload me/x '\S+/my out' --private` uploads it\.$"
  ):
    hub.push(tmp_path / 'my out', 'me/x', private=True)
  assert served.models['me/x'].files == {}
  hub.push(tmp_path / 'my out', 'me/x', private=False)
  assert served.models['me/x'].files == {'README.md': CARD.encode()}


@pytest.mark.parametrize(
  ('token', 'name', 'said'),
  [
    ('', 'me/x', 'there is no token here, .*: run `hf auth login`'),
    ('hf_unknown', 'me/x', 'there is no token here, or one that the hub does not know: run `hf auth login`'),
    ('hf_reads', 'me/x', 'the token that is logged in may only read: run `hf auth login` with one that may write'),
    ('hf_me', 'tuned', 'write it as OWNER/NAME'),
    ('hf_me', 'me/x/y', 'write it as OWNER/NAME'),
    ('hf_me', 'me/my model', 'Repo id must use alphanumeric chars'),
    ('hf_me', 'me/a--b', 'Cannot have -- or ..'),
  ],
)
def test_what_can_never_be_pushed_is_said_before(served, monkeypatch, token, name, said):
  served.users['hf_reads'] = hub_server.user('me', 'read')
  monkeypatch.setenv('HF_TOKEN', token)
  with pytest.raises(UserError, match=f'--push={name}: {said}.*; nothing was exported') as raised:
    hub.check_push(name)
  assert '\n' not in str(raised.value) and served.models == {}


def test_what_the_hub_refuses_is_said_with_what_is_left(served, tmp_path, monkeypatch):
  write(tmp_path / 'out', README_md=CARD)
  kept = r'what was exported is in \S+/out, and `hf upload \w+/x \S+/out` uploads it\.$'
  refused = r'--push=them/x: you may not write there \(You have no rights to the namespace them\): name a model of'
  with pytest.raises(UserError, match=f'{refused} yours, with a token that may write; {kept}'):
    hub.push(tmp_path / 'out', 'them/x', private=False)
  monkeypatch.setenv('HF_TOKEN', 'hf_other')  # Logged out meanwhile.
  with pytest.raises(UserError, match=f'--push=me/x: .*; {kept}'):
    hub.push(tmp_path / 'out', 'me/x', private=False)


def test_a_page_in_the_place_of_the_hub_is_said(served, monkeypatch):
  monkeypatch.setattr(served, 'answer', lambda *_: (200, {}, b'<html>Sign in</html>'))
  for ask in (hub.check_push, lambda name: hub.fetch(name, ['config.json'])):
    with pytest.raises(UserError, match=r'what answers for http://127.0.0.1:\d+ is not the hub: see that'):
      ask('me/x')


def test_nothing_is_pushed_without_a_hub(online, monkeypatch):
  def unknown(address):
    raise httpx2.ConnectError('Name or service not known')

  ask_by(monkeypatch, unknown)
  with pytest.raises(UserError, match=r'--push=me/x: https://\S+ cannot be reached .*: let this machine reach the hub'):
    hub.check_push('me/x')
  hub.unreachable.cache_clear()
  with pytest.raises(UserError, match='--push=me/x: HF_HUB_OFFLINE is set: .*; nothing was exported'):
    hub.check_push('me/x')  # It was set when the hub could not be reached.


@pytest.mark.parametrize('said, disabled', [({}, True), ({'DISABLE_TELEMETRY': '0'}, False)])
def test_telemetry_of_the_hubs_libraries_is_off_unless_the_user_says_otherwise(said, disabled):
  """What reaches the library, and the header in which it would name other libraries."""
  code = (
    'import sdpo_jax.models.hub; from huggingface_hub import constants; '
    'from huggingface_hub.utils import build_hf_headers; print(constants.HF_HUB_DISABLE_TELEMETRY, '
    '"torch/" in build_hf_headers()["user-agent"])'
  )
  names = ('HF_HUB_DISABLE_TELEMETRY', 'DISABLE_TELEMETRY', 'DO_NOT_TRACK')
  environment = {name: value for name, value in os.environ.items() if name not in names} | said
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, env=environment)
  assert done.stdout.split() == [str(disabled), str(not disabled)]
