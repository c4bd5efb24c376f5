"""The history of the starts of a run, in `fingerprint.json`.

  {"format": 1, "starts": [{"step": 0, "fencing_epoch": 1, "time": "2026-01-31T12:00:00+00:00", "changes": [],
                            "accepted": [], "parts": {"tokenizer": {"vocabulary": "3f…", …}, …}}, …]}

`step` is that of the checkpoint from which a start resumed, and `fencing_epoch` the number of the start (`epochs`).
`changes` are phrases about inputs that had changed by then, and `accepted` are the changed parts that
`trainer.accept_changes` allowed. `parts` (`fingerprint.take`) are left out if they equal those of the start before.
`lost`, which most starts do not have, are the sentences about lost lines and results that were new then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from sdpo_jax.errors import UserError
from sdpo_jax.files import write_atomically
from sdpo_jax.training.directory import sealed

FINGERPRINT = 'fingerprint.json'
FORMAT = 1

Parts = Mapping[str, Mapping[str, str]]


def read(workdir: epath.PathLike) -> Sequence[Mapping[str, Any]]:
  """Return the starts of a run, oldest first; none if there is no `fingerprint.json`.

  Raises:
    UserError: the file is damaged, or of another version.
  """
  path = epath.Path(workdir) / FINGERPRINT
  if not path.exists():
    return []
  way_out = 'restore it, or remove it, after which this start is not compared with earlier ones'
  values = sealed.read_sealed(path, way_out)
  starts = values.get('starts')
  sound = (
    values.get('format') == FORMAT
    and isinstance(starts, list)
    and all(isinstance(start, dict) and type(start.get('step')) is int and start['step'] >= 0 for start in starts)
    and all(_are_parts(start.get('parts', {})) for start in starts)
  )
  if not sound:
    raise UserError(f'{path} is not a history of starts in the format {FORMAT}: {way_out}.')
  return starts


def _are_parts(value: Any) -> bool:
  return isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())


def trained_by(starts: Sequence[Mapping[str, Any]], step: int) -> Parts | None:
  """Return the parts of the start that trained the checkpoint of `step`; None if unknown."""
  last = max((at for at, start in enumerate(starts) if start['step'] < step), default=None)
  return None if last is None else parts_of(starts[: last + 1])


def unrecorded(workdir: epath.PathLike, starts: Sequence[Mapping[str, Any]], step: int) -> list[str]:
  """Return a sentence if a resume from `step` cannot be compared with the start that trained its checkpoint."""
  path, known = epath.Path(workdir) / FINGERPRINT, not step or trained_by(starts, step) is not None
  sentence = (
    f'{path} does not record the tokenizer, data and graders of the steps up to {step}: whether they are the same now '
    'is not checked. From now on it is.'
  )
  return [] if known else [sentence]


def parts_of(starts: Sequence[Mapping[str, Any]]) -> Parts | None:
  """Return the parts of the last of the given starts, which an earlier one may hold; None if unknown."""
  return next((start['parts'] for start in reversed(starts) if 'parts' in start), None)


def write(workdir: epath.Path, starts: Sequence[Mapping[str, Any]]) -> None:
  """Write all starts of a run; errors as in `write_atomically`."""
  write_atomically(workdir / FINGERPRINT, sealed.seal({'format': FORMAT, 'starts': list(starts)}))
