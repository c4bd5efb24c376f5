"""Reading and writing of PEFT's (0.21) adapter_config.json: which modules have factors, their ranks and alphas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

from sdpo_jax.config.fields import MALFORMED_PATTERN, is_number
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.adapters import lora
from sdpo_jax.models.parameters import Table

FILE = 'adapter_config.json'
VERSION = '0.21.2'  # PEFT version whose format is written.
# Modules outside of the layers, in the supported families.
_OUTSIDE = ('lm_head', 'embed_tokens')
# Entries about how an adapter was made, or how PEFT computes with it, which do not change the result.
# `fan_in_fan_out` is about Conv1D, which no supported model has; PEFT itself sets it to false for other modules.
_IGNORED = frozenset(
  """auto_mapping base_model_name_or_path revision inference_mode peft_version lora_dropout fan_in_fan_out loftq_config
  eva_config corda_config lora_ga_config qalora_group_size megatron_core ensure_weight_tying runtime_config""".split()
)
_READ = frozenset(
  """peft_type task_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules
  layers_to_transform layers_pattern init_lora_weights""".split()
)
# Initialisations that do not change the model. Others (pissa, olora, corda, loftq, lora_ga) subtract the initial
# product of the factors from the model, and PEFT does so again when it loads them; mica trains A only.
_INITIALISATIONS = (True, False, 'gaussian', 'orthogonal', 'eva')
# Why some entries that are not read must have their defaults.
_WHY = {
  'use_dora': 'DoRA also scales every column of a matrix',
  'bias': 'biases are not trained here',
  'modules_to_save': 'it holds whole modules beside the factors',
  'trainable_token_indices': 'it holds rows of the embedding beside the factors',
  'target_parameters': 'it adapts parameters that are not modules, such as experts',
  'lora_bias': 'its factors have biases',
  'layer_replication': 'it makes another model of the base',
  'alora_invocation_tokens': 'it is active only after certain tokens',
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
  """The entries of an adapter_config.json that determine the function that an adapter computes."""

  source: str  # The file, for error messages.
  rank: int
  alpha: float
  use_rslora: bool
  target_modules: str | tuple[str, ...]  # A regular expression for whole names, or a list of ends of names.
  exclude_modules: str | tuple[str, ...] = ()
  layers: tuple[int, ...] | None = None  # None: all.
  layers_pattern: tuple[str, ...] = ()  # Patterns of the name before the number of a layer; empty: any name.
  rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
  alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
  base: str | None = None  # Name or path of the base model; None: not given.

  def targets(self, module: str) -> bool:
    """Return whether a module has factors, by PEFT's rules."""
    if self._listed('exclude_modules', module) or not self._listed('target_modules', module):
      return False
    exact = not isinstance(self.target_modules, str) and module in self.target_modules
    if self.layers is None or exact:
      return True
    patterns = self.layers_pattern or (r'[^.]*',)
    numbers = (
      self._found('layers_pattern', rf'(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.', module) for pattern in patterns
    )
    first = next((number for number in numbers if number is not None), None)
    return first is not None and int(first['layer']) in self.layers

  def rank_of(self, module: str) -> int:
    """Return r of a module: of the first matching `rank_pattern`, or else `rank`."""
    return self.rank_pattern.get(self._pattern('rank_pattern', module), self.rank)

  def alpha_of(self, module: str) -> float:
    """Return alpha of a module: of the first matching `alpha_pattern`, or else `alpha`."""
    return self.alpha_pattern.get(self._pattern('alpha_pattern', module), self.alpha)

  def _listed(self, entry: str, module: str) -> bool:
    names = getattr(self, entry)
    if isinstance(names, str):
      if names.lower() == lora.ALL_LINEAR:
        return module.rsplit('.', 1)[-1] not in _OUTSIDE
      return self._found(entry, names, module, whole=True) is not None
    return any(module == name or module.endswith(f'.{name}') for name in names)

  def _pattern(self, entry: str, module: str) -> str | None:
    """Return the first pattern that matches a module's name or the end of it; None if none does."""
    patterns = getattr(self, entry)
    return next((key for key in patterns if self._found(entry, rf'(.*\.)?({key})$', module)), None)

  def _found(self, entry: str, pattern: str, module: str, whole: bool = False) -> re.Match[str] | None:
    try:
      return re.fullmatch(pattern, module) if whole else re.match(pattern, module)
    except MALFORMED_PATTERN as error:
      raise UserError(
        f'{self.source}: {entry} holds {short_repr(pattern)}, which is not a regular expression ({error}): correct it, '
        'or get the adapter again.'
      ) from error


def read(values: Mapping[str, Any], source: str) -> AdapterConfig:
  """Return the configuration in the contents of an adapter_config.json.

  Args:
    values: the contents.
    source: path of the file, for error messages.

  Raises:
    UserError: an entry, which the message names, is missing, malformed or not supported.
  """

  def refuse(entry: str, why: str) -> UserError:
    found = short_repr(values[entry]) if entry in values else 'missing'
    # A key of a JSON object can be any text of any length.
    named = entry if re.fullmatch('[a-z0-9_]{1,60}', entry) else short_repr(entry)
    return UserError(f'{source}: {named} is {found}{why}')

  def entry(name: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
    value = values.get(name)
    if value is None:
      return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
      raise refuse(name, f', but must be {what}: correct it, or get the adapter again.')
    return value

  def names(name: str) -> str | tuple[str, ...]:
    value = entry(name, (str, list), 'a regular expression or a list of names', [])
    if not isinstance(value, str) and not all(isinstance(item, str) and item for item in value):
      raise refuse(name, ', but must be a regular expression or a list of names: correct it, or get the adapter again.')
    return value if isinstance(value, str) else tuple(value)

  def positive(name: str, value: Any, whole: bool) -> Any:
    if not (is_number(value) and (isinstance(value, int) or not whole) and value > 0):
      what = 'a whole number of at least 1' if whole else 'a number above 0'
      raise refuse(name, f', but must be {what}: correct it, or get the adapter again.')
    return value

  def patterns(name: str, whole: bool) -> dict[str, Any]:
    return {key: positive(name, value, whole) for key, value in entry(name, (dict,), 'a JSON object', {}).items()}

  if values.get('peft_type') != 'LORA':
    raise refuse('peft_type', ', but only LORA adapters are supported: train one, or merge this one into its base.')
  if values.get('task_type') not in (None, 'CAUSAL_LM'):
    raise refuse('task_type', ', but only adapters of language models (CAUSAL_LM) are supported.')
  initialisation = values.get('init_lora_weights', True)
  if initialisation not in _INITIALISATIONS:
    raise refuse(
      'init_lora_weights',
      ', which changes the base model beside its factors and is not supported: convert the adapter with '
      'save_pretrained(…, path_initial_model_for_weight_conversion=…) of PEFT, or merge it into its base.',
    )
  for name, value in values.items():
    default = 'none' if name == 'bias' else None
    if name not in _READ | _IGNORED and value and value != default:
      why = f' ({_WHY[name]})' if name in _WHY else ''
      raise refuse(
        name, f', which is not supported{why}: train an adapter without it, or merge this one into its base.'
      )
  targets, excluded = names('target_modules'), names('exclude_modules')
  if not targets:
    raise refuse('target_modules', ', but must say which modules have factors: get the adapter again.')
  inside = re.compile(r'(?:.*\.)?(?:' + '|'.join(_OUTSIDE) + ')$')
  if not isinstance(targets, str) and (outside := [name for name in targets if inside.match(name)]):
    raise refuse(
      'target_modules',
      f': adapters of {" and ".join(outside)} are not supported, only those of matrices of the layers: train one of '
      'these, or merge this one into its base.',
    )
  layers = entry('layers_to_transform', (int, list), 'numbers of layers', [])
  layers = [layers] if isinstance(layers, int) else layers
  if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
    raise refuse('layers_to_transform', ', but must be numbers of layers: correct it, or get the adapter again.')
  before = names('layers_pattern')
  if 'r' not in values:  # PEFT has a default, 8, but always writes it.
    raise refuse('r', ': this is not the configuration of a LoRA adapter; get the adapter again.')
  return AdapterConfig(
    source=source,
    rank=positive('r', values['r'], whole=True),
    alpha=positive('lora_alpha', values.get('lora_alpha', 8), whole=False),
    use_rslora=entry('use_rslora', (bool,), 'true or false', False),
    target_modules=targets,
    exclude_modules=excluded,
    layers=tuple(layers) or None,
    layers_pattern=(before,) if isinstance(before, str) and before else tuple(before),
    rank_pattern=patterns('rank_pattern', whole=True),
    alpha_pattern=patterns('alpha_pattern', whole=False),
    base=entry('base_model_name_or_path', (str,), 'a name', None),
  )


def adapter_of(config: AdapterConfig, table: Table, modules: Mapping[lora.Module, str]) -> lora.Adapter:
  """Return the adapter that a configuration describes for a model.

  Args:
    config: configuration of the adapter.
    table: table of the model without factors.
    modules: names of the matrices of the layers in the model of the adapter.

  Raises:
    UserError: no matrix has factors, or a matrix has different ranks in two layers.
  """
  chosen = [module for module, name in modules.items() if config.targets(name)]
  if not chosen:
    some = ', '.join(sorted({name.rsplit('.', 1)[-1] for name in modules.values()}))
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    raise UserError(
      f'{config.source}: target_modules is {short_repr(targets)}, which matches nothing in this model, whose matrices '
      f'are called {some}: load the adapter onto its own base model.'
    )
  return lora.build(
    table,
    chosen,
    ranks={module: config.rank_of(modules[module]) for module in chosen},
    alphas={module: config.alpha_of(modules[module]) for module in chosen},
    use_rslora=config.use_rslora,
    source=config.source,
  )


def contents(
  adapter: lora.Adapter, modules: Mapping[lora.Module, str], *, whole: bool, use_rslora: bool, base: str
) -> dict[str, Any]:
  """Return the contents of an adapter_config.json with which PEFT computes the same function.

  Args:
    adapter: the adapter.
    modules: names of the matrices of the layers in transformers.
    whole: whether no other modules of the model have names with these ends; else modules are listed one by one.
    use_rslora: whether alphas are those of rank-stabilised LoRA.
    base: `base_model_name_or_path`.
  """
  layers = 1 + max(layer for _, layer in modules)
  held = {
    modules[target.name, layer]: (target.rank, _alpha(target, layer, use_rslora))
    for target in adapter.targets
    for layer in range(layers)
    if target.scales[layer]
  }
  rank = Counter(rank for rank, _ in held.values()).most_common(1)[0][0]
  alpha = Counter(alpha for _, alpha in held.values()).most_common(1)[0][0]
  ends = whole and all(all(target.scales) for target in adapter.targets)
  return {
    'alpha_pattern': _patterns({name: own for name, (_, own) in held.items() if own != alpha}, modules),
    'auto_mapping': None,
    'base_model_name_or_path': base,
    'bias': 'none',
    'exclude_modules': None,
    'fan_in_fan_out': False,
    'inference_mode': True,
    'init_lora_weights': True,
    'layer_replication': None,
    'layers_pattern': None,
    'layers_to_transform': None,
    'lora_alpha': alpha,
    'lora_bias': False,
    'lora_dropout': 0.0,
    'modules_to_save': None,
    'peft_type': 'LORA',
    'peft_version': VERSION,
    'r': rank,
    'rank_pattern': _patterns({name: own for name, (own, _) in held.items() if own != rank}, modules),
    'revision': None,
    'target_modules': sorted({name.rsplit('.', 1)[-1] for name in held}) if ends else list(held),
    'target_parameters': None,
    'task_type': 'CAUSAL_LM',
    'trainable_token_indices': None,
    'use_dora': False,
    'use_rslora': use_rslora,
  }


def _patterns(own: Mapping[str, float], modules: Mapping[lora.Module, str]) -> dict[str, float]:
  """Return the value by pattern: the end of a name if all modules with that end have the value, else the whole name."""
  found: dict[str, float] = {}
  for name, value in own.items():
    end = name.rsplit('.', 1)[-1]
    alike = [other for other in modules.values() if other.rsplit('.', 1)[-1] == end]
    shared = all(own.get(other) == value for other in alike)
    found[end if shared else f'^{re.escape(name)}'] = value
  return found


def _alpha(target: lora.Target, layer: int, use_rslora: bool) -> float:
  """Return alpha of a layer, rounded if it is an integer up to rounding errors."""
  alpha = target.scales[layer] * (math.sqrt(target.rank) if use_rslora else target.rank)
  return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def same_names(table: Table, prefix: str = 'model.') -> dict[lora.Module, str]:
  """Return the names in transformers of the matrices of the layers.

  They begin with `prefix` instead of 'model.', for models whose text model is part of a larger one.
  """
  return {module: prefix + known[-1].removeprefix('model.') for module, known in lora.names(table).items()}
