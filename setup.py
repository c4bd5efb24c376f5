"""Installs models/, launch/ and configs/ of the repository as sdpo_jax.models, sdpo_jax.launch and sdpo_jax.configs.

A wheel also holds a bill of materials (PEP 770): the commit it was made of, and the packages of requirements.lock.
Everything else about the package is in pyproject.toml.
"""

import json
import pathlib
import re
import subprocess

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

ROOT = pathlib.Path(__file__).parent
BESIDE = ('models', 'launch', 'configs')  # Packages that lie beside sdpo_jax/ in the repository.
COMMIT = 'commit.txt'  # In a source distribution and in a wheel's .dist-info.


def commit() -> str | None:
  """Return the commit of these files, with -dirty if some have changed since; None if that is not known."""
  if (ROOT / COMMIT).is_file():  # A source distribution.
    return (ROOT / COMMIT).read_text().strip()
  if not (ROOT / '.git').exists():
    return None
  asked = ['git', 'describe', '--always', '--abbrev=40', '--dirty', '--exclude=*']
  try:
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
  except FileNotFoundError:  # No git.
    return None
  return done.stdout.strip() if done.returncode == 0 else None


def bill_of_materials(version: str, revision: str | None) -> dict[str, object]:
  """Return the CycloneDX bill of materials of a base install from requirements.lock."""
  locked = re.findall(r'^([\w.-]+)==([\w.]+)([^\n]*)((?:\n +--hash=sha256:\w+[ \\]*)+)', _lock(), re.MULTILINE)
  own = {'type': 'application', 'name': 'sdpo_jax', 'version': version, 'purl': f'pkg:pypi/sdpo-jax@{version}'}
  known = {} if revision is None else {'pedigree': {'commits': [{'uid': revision}]}}
  return {
    '$schema': 'http://cyclonedx.org/schema/bom-1.6.schema.json',
    'bomFormat': 'CycloneDX',
    'specVersion': '1.6',
    'version': 1,
    'metadata': {'component': {**own, 'licenses': [{'license': {'id': 'Apache-2.0'}}], **known}},
    'components': [
      {
        'type': 'library',
        'bom-ref': f'pkg:pypi/{name}@{release}',
        'name': name,
        'version': release,
        'purl': f'pkg:pypi/{name}@{release}',
        'properties': [{'name': 'marker', 'value': marker}] if (marker := condition.strip(' ;\\')) else [],
        # The archives for the interpreters of the lock.
        'externalReferences': [
          {
            'type': 'distribution',
            'url': f'https://pypi.org/project/{name}/{release}/#files',
            'hashes': [{'alg': 'SHA-256', 'content': digest}],
          }
          for digest in re.findall(r'sha256:(\w+)', hashes)
        ],
      }
      for name, release, condition, hashes in locked
    ],
  }


def _lock() -> str:
  return (ROOT / 'requirements.lock').read_text()


class Wheel(bdist_wheel):
  """Adds the commit and the bill of materials to the metadata of a wheel, and of an editable installation."""

  def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
    super().egg2dist(egginfo_path, distinfo_path)
    folder, revision = pathlib.Path(distinfo_path), commit()
    (folder / 'sboms').mkdir()
    bill = bill_of_materials(self.distribution.get_version(), revision)
    (folder / 'sboms' / 'sdpo_jax.cdx.json').write_text(json.dumps(bill, indent=1) + '\n')
    if revision is not None:
      (folder / COMMIT).write_text(f'{revision}\n')


class Sources(sdist):
  """Adds the commit and the lock, which a wheel that is made of a source distribution needs."""

  def make_release_tree(self, base_dir: str, files: list[str]) -> None:
    super().make_release_tree(base_dir, [*files, 'requirements.lock'])
    if (revision := commit()) is not None:
      (pathlib.Path(base_dir) / COMMIT).write_text(f'{revision}\n')


setup(
  cmdclass={'bdist_wheel': Wheel, 'sdist': Sources},
  packages=[
    name if name.startswith('sdpo_jax') else f'sdpo_jax.{name}'
    for package in ('sdpo_jax', *BESIDE)
    for name in find_packages(include=[package, f'{package}.*'])
  ],
  package_dir={f'sdpo_jax.{name}': name for name in BESIDE},
)
