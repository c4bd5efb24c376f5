"""The notebooks run from top to bottom without anybody, with fewer steps."""

import os

import nbclient
import nbformat
import pytest

from tests import local_server, tiny

NOTEBOOKS = sorted((tiny.REPOSITORY / 'examples' / 'notebooks').glob('*.ipynb'))
PRINTED = {  # What the last cell shows.
  'own_grader': 'model.safetensors',
  'quickstart': "['",
  'service_client': '(7, 0)',  # Version 6, undone.
}


def test_notebooks_hold_no_output():
  assert {path.stem for path in NOTEBOOKS} == set(PRINTED)
  for path in NOTEBOOKS:
    cells = nbformat.read(path, 4).cells
    assert not any(cell.get('outputs') or cell.get('execution_count') for cell in cells), path.name


@pytest.mark.docs
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
  notebook = nbformat.read(path, 4)
  shown = {'STEPS = 100': 'STEPS = 2', 'STEPS = 40': 'STEPS = 2', '8420': str(local_server.free_port())}
  for cell in notebook.cells:
    for text, other in shown.items():
      cell.source = cell.source.replace(text, other)
  for name, value in tiny.environment().items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv('PYTHONPATH', str(tiny.REPOSITORY))
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
  done = nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': str(tmp_path)}}).execute()
  last = [cell for cell in done.cells if cell.cell_type == 'code'][-1]
  assert PRINTED[path.stem] in os.linesep.join(str(output.get('data', output)) for output in last.outputs)
