"""Golden cartridges: files of both published classes are read, and written anew from their arrays."""

from __future__ import annotations

from pathlib import Path
import tempfile
from typing import Any

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.models.adapters import cartridge_pt
from sdpo_jax.models.adapters.cartridge import Cartridge
from tests.golden.report import Report, load

SPELLINGS = ('fixed', 'frozen')


def check(directory: Path) -> Report:
  """Check every *.npz in `directory` and the files NAME_fixed.pt and NAME_frozen.pt beside it, to the last bit."""
  report = Report('cartridges')
  for path in sorted(directory.glob('*.npz')):
    report.cases += 1
    data = load(path)
    files = {spelling: path.with_name(f'{path.stem}_{spelling}.pt') for spelling in SPELLINGS}
    if not any(file.exists() for file in files.values()):
      report.fail(path.stem, 'has neither of its two .pt files')
    for spelling, file in files.items():
      if file.exists():
        _check_file(report, path.stem, spelling, file, data)
      else:
        report.note(path.stem, f'{file.name} is not there')
  return report


def _check_file(report: Report, case: str, spelling: str, file: Path, data: dict) -> None:
  try:
    ours = cartridge_pt.read(file)
  except UserError as problem:
    report.fail(case, f'{file.name} is refused: {problem}')
    return
  for name in ('keys', 'values'):
    report.compare(case, f'{name} ({spelling})', getattr(ours, name), data[name], 0.0, float64=True)
  if ours.frozen != data['frozen']:
    report.fail(case, f'{file.name} has {ours.frozen} frozen slots, expected {data["frozen"]}')
  with tempfile.TemporaryDirectory() as folder:
    written = Path(folder) / file.name
    cartridge = Cartridge(data['keys'], data['values'], int(data['frozen']))
    cartridge_pt.write(written, cartridge, spelling, 'float32')
    found, expected = _contents(written), _contents(file)
  if found != expected:
    report.fail(case, f'what is written as {spelling} differs from {file.name}')


def _contents(file: Path) -> list[tuple[str, type, list[Any]]]:
  """Return what a file holds, in its order: keys, types of lists, and of each tensor type, dtype, shape, flag and
  bytes.
  """
  import torch

  with torch.serialization.safe_globals([torch.nn.ParameterList]):
    content = torch.load(file, weights_only=True)
  return [
    (
      name,
      type(tensors),
      [
        (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, _bytes(tensor.detach().numpy()))
        for tensor in tensors
      ],
    )
    for name, tensors in content.items()
  ]


def _bytes(array: np.ndarray) -> bytes:
  return np.ascontiguousarray(array).tobytes()
