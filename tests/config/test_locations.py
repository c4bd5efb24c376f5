"""Paths that settings name."""

from sdpo_jax.config.locations import paths


def test_several_paths_are_divided_by_commas_but_not_one_that_exists(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  assert paths('a.txt, b,gs://c/d') == ['a.txt', 'b', 'gs://c/d'] and paths('') == ['']
  (tmp_path / 'Smith, 2024.txt').write_text('')
  (tmp_path / 'a,b').mkdir()
  for given in ('Smith, 2024.txt', '~/Smith, 2024.txt', str(tmp_path / 'a,b')):
    assert paths(given) == [given]
