"""SDPO (Self-Distilled Policy Optimization, arXiv 2601.20802) in JAX.

`sdpo_jax.train` and the other public functions (docs/python.md) live in `sdpo_jax.interface`, which is imported when
one of them is first used; `__init__.pyi` declares them for type checkers.
"""

# Nothing else is imported here: with `python -m` modules of the working directory would come first.
import importlib
import os

__version__ = '0.1.0'
__all__ = 'Callback Config Result Step UserError evaluate export generator load_config read_metrics steps train'.split()

if not os.path.isdir(f'{__path__[0]}/models'):  # In a checkout models, launch and configs lie beside this package.
  __path__.append(os.path.dirname(__path__[0]))
if not {'HF_HUB_DISABLE_TELEMETRY', 'DISABLE_TELEMETRY', 'DO_NOT_TRACK'} & os.environ.keys():  # Users may decide.
  os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'  # Libraries of the hub would report what they are used with.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')  # It would advise to install PyTorch.


def __getattr__(name: str) -> object:
  if name in __all__:
    module = 'errors' if name == 'UserError' else 'interface'
    return getattr(importlib.import_module(f'sdpo_jax.{module}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
