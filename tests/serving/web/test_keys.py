"""Keys: shown once, stored hashed, refused as soon as they are taken out, and never read from a file that others can
read.
"""

import hashlib
import hmac
import json
import os
import stat

import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.serving.store.database import connect
from sdpo_jax.serving.web import keys
from tests.serving.served_process import until
from tests.serving.store.postgres import postgres  # noqa: F401 (A fixture.)


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'deep' / 'keys.jsonl'


def test_a_key_is_found_by_itself_and_stored_as_its_digest_in_a_private_file(path):
  secret, made = keys.add(path, 'ada', 'laptop')
  assert secret.startswith('sdpo_') and len(secret) > 40
  text = path.read_text()
  assert secret not in text and secret.removeprefix('sdpo_') not in text
  assert json.loads(text)['digest'] == hashlib.sha256(secret.encode()).hexdigest()
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  file = keys.KeyFile(path)
  assert file.find(secret) == made and made.owner == 'ada'
  assert all(file.find(wrong) is None for wrong in ('', 'sdpo_', secret[:-1], secret + 'x', made.digest))


def test_a_weight_is_kept_and_files_without_weights_have_equal_ones(path):
  assert keys.add(path, 'ada', 'laptop', 2.5)[1].weight == 2.5 and keys.read(path)[0].weight == 2.5
  old = json.loads(path.read_text())
  del old['weight']
  path.write_text(json.dumps(old))
  assert keys.read(path)[0].weight == 1.0
  for weight in (0.0, -1.0, 1000.0, float('nan')):
    with pytest.raises(UserError, match=r'--weight=.* must lie in \[0.01, 100\]'):
      keys.add(path, 'ada', 'laptop', weight)


def test_every_digest_is_compared_in_constant_time(path, monkeypatch):
  secrets = [keys.add(path, 'ada', str(number))[0] for number in range(3)]
  compared, compare = [], hmac.compare_digest

  def watched(a, b):
    compared.append((len(a), len(b)))
    return compare(a, b)

  monkeypatch.setattr(keys.hmac, 'compare_digest', watched)
  file = keys.KeyFile(path)
  for presented in (secrets[0], secrets[2], 'sdpo_none'):
    compared.clear()
    file.find(presented)
    assert compared == [(64, 64)] * 3


def test_the_file_is_read_again_when_it_changes(path):
  first, made = keys.add(path, 'ada', 'one')
  file = keys.KeyFile(path)
  second, _ = keys.add(path, 'bob', 'two')
  assert file.find(second).owner == 'bob' and file.find(first).owner == 'ada'
  assert keys.revoke(path, made.id) == made
  assert file.find(first) is None and file.find(second).owner == 'bob'
  with pytest.raises(UserError, match='no key with the id'):
    keys.revoke(path, made.id)


def test_no_key_is_accepted_while_the_file_is_damaged_gone_or_open_to_others(path):
  secret, _ = keys.add(path, 'ada', 'one')
  file, content = keys.KeyFile(path), path.read_bytes()
  path.write_bytes(content + b'{"id": 1}\n')
  assert file.find(secret) is None
  path.write_bytes(content)
  os.utime(path, ns=(1, 1))
  assert file.find(secret) is not None
  path.chmod(0o640)
  assert file.find(secret) is None
  path.chmod(0o600)
  assert file.find(secret) is not None
  path.unlink()
  assert file.find(secret) is None


@pytest.mark.parametrize(
  'content, sentence',
  [
    (b'', 'holds no key'),
    (b'not json\n', 'line 1 is not a key'),
    (b'[]\n', 'line 1'),
    (b'\xff\xfe', 'cannot be read'),
    (b'{"id": "a", "digest": "b", "owner": "c", "name": "d", "created": 1}\n', 'invalid digest, owner or weight'),
  ],
)
def test_a_file_that_is_none_of_keys_is_refused_with_its_line(path, content, sentence):
  path.parent.mkdir()
  path.touch(0o600)
  path.write_bytes(content)
  with pytest.raises(UserError, match=sentence):
    keys.KeyFile(path)


def test_a_file_that_others_can_read_is_refused(path):
  keys.add(path, 'ada', 'one')
  path.chmod(0o644)
  with pytest.raises(UserError, match='chmod 600'):
    keys.KeyFile(path)
  with pytest.raises(UserError, match='launch.serve_key'):
    keys.KeyFile(path.with_name('other'))


@pytest.mark.parametrize('owner, name', [('', 'x'), ('ada', ''), ('a' * 201, 'x'), ('a\nb', 'x')])
def test_owners_and_names_are_printable(path, owner, name):
  with pytest.raises(UserError, match='printable characters'):
    keys.add(path, owner, name)


@pytest.mark.parametrize(
  'headers, found',
  [
    ({'authorization': ['Bearer sdpo_a']}, 'sdpo_a'),
    ({'authorization': ['bearer  sdpo_a ']}, 'sdpo_a'),
    ({'x-api-key': ['sdpo_a']}, 'sdpo_a'),
    ({'x-api-key': ['sdpo_a'], 'authorization': ['Bearer sdpo_a']}, 'sdpo_a'),
    ({'x-api-key': ['sdpo_a'], 'authorization': ['Bearer sdpo_b']}, None),
    ({'x-api-key': ['sdpo_a', 'sdpo_b']}, None),
    ({'authorization': ['Basic c2Rwbzo=']}, None),
    ({'authorization': ['Basic c2Rwbzo='], 'x-api-key': ['sdpo_a']}, None),
    ({'authorization': ['Bearer ']}, None),
    ({}, None),
  ],
)
def test_bearer_and_header_are_the_same_and_two_different_keys_are_none(headers, found):
  assert keys.presented(headers) == found


def test_keys_of_a_database_are_followed(postgres, monkeypatch):  # noqa: F811
  monkeypatch.setattr(keys, '_READ_AGAIN', 0.01)
  url = postgres.url()
  with pytest.raises(UserError, match='not at postgres://…'):
    keys.place_of('postgres://ada:secret@host/db')
  with pytest.raises(UserError, match=r'^The database of the keys=x cannot be used \(.*') as caught:
    keys.read('postgresql://ada:secret@/x?host=/no/such')
  assert 'secret' not in str(caught.value)
  with pytest.raises(UserError, match=r'holds no key: .*--keys=postgresql://…'):
    keys.open_place(url)
  secret, mine = keys.add(url, 'ada', 'laptop', 2.0)
  table = keys.open_place(url)
  assert table.find(secret) == mine and keys.read(url) == [mine] and table.find(secret[:-1]) is None
  other, his = keys.add(url, 'bob', 'desk')
  until(lambda: table.find(other) == his)
  assert keys.revoke(url, mine.id) == mine and keys.read(url) == [his]
  until(lambda: table.find(secret) is None)
  with pytest.raises(UserError, match=f'no key with the id nobody; it has {his.id}'):
    keys.revoke(url, 'nobody')
  connections = connect(url)
  with connections.writing(True, None) as rows:
    rows.execute("UPDATE api_keys SET record = '{}'")
  connections.close()
  with pytest.raises(UserError, match=f'The row {his.id} of api_keys is not a key'):
    keys.read(url)
  until(lambda: table.find(other) is None)  # What cannot be read lets nobody in.
  table.close()
