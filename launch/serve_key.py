"""Makes, lists and revokes the API keys of a service.

  python -m launch.serve_key --keys=keys.jsonl --owner=ada                  # a new key, printed once
  python -m launch.serve_key --keys=keys.jsonl                              # lists the keys
  python -m launch.serve_key --keys=keys.jsonl --revoke=ID

The file holds digests only: a lost key can be replaced but not recovered. Keys of one owner reach the same adapters. A
service that uses the file (serve.http.keys) follows every change at once. For replicas of a service, --keys is the
postgresql://… that they share, whose changes they follow within 2 seconds.
"""

import datetime
import sys

from absl import flags

from sdpo_jax import command
from sdpo_jax.errors import UserError

FILE = flags.DEFINE_string('keys', None, 'File of the keys, created if needed; or postgresql://….', required=True)
OWNER = flags.DEFINE_string('owner', None, 'Make a new key, which reaches the adapters of this owner.')
NAME = flags.DEFINE_string('name', 'key', 'Label of a new key.')
WEIGHT = flags.DEFINE_float('weight', 1.0, 'Share of the engine of a new key, relative to that of other keys.')
REVOKE = flags.DEFINE_string('revoke', None, 'Id of a key to refuse from now on.')


def main() -> None:
  """Make, revoke or list keys; a new key goes to stdout, everything else about it to stderr."""
  from sdpo_jax.serving.web import keys

  path = keys.place_of(FILE.value)
  if OWNER.value is not None and REVOKE.value is not None:
    raise UserError('--owner makes a key and --revoke takes one away: give only one of them.')
  if OWNER.value is not None:
    secret, key = keys.add(path, OWNER.value, NAME.value, WEIGHT.value)
    print(f'The key {key.id} of {key.owner}, shown only now:', file=sys.stderr)
    print(secret)
  elif REVOKE.value is not None:
    key = keys.revoke(path, REVOKE.value)
    print(f'The key {key.id} ({key.name}) of {key.owner} is refused from now on.', file=sys.stderr)
  else:
    known = keys.read(path)
    if not known:
      print(f'{keys.shown(path)} has no keys: --owner=NAME makes one.', file=sys.stderr)
    for key in known:
      made = datetime.datetime.fromtimestamp(key.created, datetime.UTC).strftime('%Y-%m-%d')
      print(f'{key.id}  {made}  {key.weight:g}  {key.owner}  {key.name}')


if __name__ == '__main__':
  command.run(main)
