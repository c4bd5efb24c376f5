"""A process that makes versions of an adapter, whenever its replica may, and says which."""

import sys
import time

from sdpo_jax.serving.errors import InFlight, NotHolder, StorageFailed, VersionConflict
from sdpo_jax.serving.store import leases
from sdpo_jax.serving.store.store import Store, StoredResponse
from tests.serving.store import store_cases


def main(root: str, database: str, name: str) -> None:
  leases.LIFETIME = 1.0
  store, made = Store.open(root, database, base=store_cases.tiny_base(), url=f'http://{name}'), 0
  print('ready', flush=True)
  while True:
    try:
      adapter = store.by_name('ada', 'mine')
      begun = store.begin('ada', f'{name} {made}', 'body')
      if isinstance(begun, StoredResponse):
        version = store.version('ada', adapter.id, begun.version)
      else:
        try:
          arrays = store_cases.arrays(adapter.head)
          how = {'reason': 'feedback', 'details': {}, 'request': begun}
          version = store.commit('ada', adapter.id, adapter.head, arrays, **how)
        finally:
          store.abandon(begun)
    except (NotHolder, InFlight, StorageFailed, VersionConflict):
      time.sleep(0.02)
      continue
    made += 1
    print(version.number, version.digest, flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
