"""The benchmark of many adapters: it leaves the store that it measures as it was, and all is measured."""

import argparse

from benchmarks import many_adapters
from tests.serving.store.store_cases import open_store


def test_the_store_stays_as_it_was_and_everything_is_measured(tmp_path, monkeypatch):
  monkeypatch.setattr(many_adapters, 'CREATED', 1)
  args = argparse.Namespace(adapters=5, folder=tmp_path / 'now')
  for _ in range(2):  # The second time finds the adapters.
    found = many_adapters.store(args)
    with open_store(args.folder) as store:
      assert [adapter.name for adapter in store.adapters('ada')] == [f'a{number}' for number in range(5)]
    whole = [f'{what}_{size}' for what in ('start', 'page', 'create') for size in ('empty', 'full')]
    after = ('start_{}_after_a_kill', 'first_use_{}', 'comparison_{}')
    whole += [name.format(size) for name in after for size in ('empty', 'full')]
    assert found.keys() == {f'{name}_{unit}' for name in whole for unit in ('ms', 'cpu_ms')}
    assert all(value > 0 for value in found.values())
