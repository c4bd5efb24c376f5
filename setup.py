"""Installs models/, launch/ and configs/ of the repository as sdpo_jax.models, sdpo_jax.launch and sdpo_jax.configs.

Everything else about the package is in pyproject.toml.
"""

from setuptools import find_packages, setup

BESIDE = ('models', 'launch', 'configs')  # Packages that lie beside sdpo_jax/ in the repository.

setup(
  packages=[
    name if name.startswith('sdpo_jax') else f'sdpo_jax.{name}'
    for package in ('sdpo_jax', *BESIDE)
    for name in find_packages(include=[package, f'{package}.*'])
  ],
  package_dir={f'sdpo_jax.{name}': name for name in BESIDE},
)
