"""The declaration of a family of models: how its files describe the architecture and name the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import config_json
from sdpo_jax.models.families.config_json import Json

_LAYER = 'model.layers.{layer}.'
# Parameter name → tensor name in most families.
NAMES: Mapping[str, str] = {
  'embedding': 'model.embed_tokens.weight',
  'layers.attention_norm': f'{_LAYER}input_layernorm.weight',
  'layers.attention.query': f'{_LAYER}self_attn.q_proj.weight',
  'layers.attention.key': f'{_LAYER}self_attn.k_proj.weight',
  'layers.attention.value': f'{_LAYER}self_attn.v_proj.weight',
  'layers.attention.output': f'{_LAYER}self_attn.o_proj.weight',
  'layers.attention.query_bias': f'{_LAYER}self_attn.q_proj.bias',
  'layers.attention.key_bias': f'{_LAYER}self_attn.k_proj.bias',
  'layers.attention.value_bias': f'{_LAYER}self_attn.v_proj.bias',
  'layers.attention.output_bias': f'{_LAYER}self_attn.o_proj.bias',
  'layers.attention.query_norm': f'{_LAYER}self_attn.q_norm.weight',
  'layers.attention.key_norm': f'{_LAYER}self_attn.k_norm.weight',
  'layers.mlp_norm': f'{_LAYER}post_attention_layernorm.weight',
  'layers.mlp.gate': f'{_LAYER}mlp.gate_proj.weight',
  'layers.mlp.up': f'{_LAYER}mlp.up_proj.weight',
  'layers.mlp.down': f'{_LAYER}mlp.down_proj.weight',
  'layers.mlp.gate_bias': f'{_LAYER}mlp.gate_proj.bias',
  'layers.mlp.up_bias': f'{_LAYER}mlp.up_proj.bias',
  'layers.mlp.down_bias': f'{_LAYER}mlp.down_proj.bias',
  'final_norm': 'model.norm.weight',
  'unembedding': 'lm_head.weight',
}
# Names that differ in families that normalise the outputs of attention and MLP.
POST_NORM_NAMES: Mapping[str, str] = {
  'layers.attention_post_norm': f'{_LAYER}post_attention_layernorm.weight',
  'layers.mlp_norm': f'{_LAYER}pre_feedforward_layernorm.weight',
  'layers.mlp_post_norm': f'{_LAYER}post_feedforward_layernorm.weight',
}


@dataclasses.dataclass(frozen=True)
class Family:
  """The file format of a family of models: config.json and tensor names, as in transformers."""

  name: str  # `Architecture.family`.
  model_types: tuple[str, ...]  # Values of model_type in config.json; exports get the last.
  writer: str  # Class of transformers that builds the model.
  defaults: Json  # Entries that a config.json may lack.
  # Returns the fields of `Architecture` that the family reads in its own way, given the contents of a config.json (with
  # defaults), the number of layers and the name of the file; raises UserError.
  fields: Callable[[Json, int, str], dict[str, Any]]
  # Returns the entries of a config.json for those fields.
  entries: Callable[[Architecture], Json]
  names: Mapping[str, str] = dataclasses.field(default_factory=lambda: NAMES)  # Parameter name → tensor name.
  activation_key: str = 'hidden_act'  # Entry of config.json for the MLP's activation.
  # Returns the part of a config.json about the text model, given the contents and the name of the file.
  text: Callable[[Json, str], Json] = lambda values, source: values
  # Returns the name in `names` for a tensor name in a file; None: the tensor belongs to a part that is not trained.
  known_name: Callable[[str], str | None] = lambda name: name
  # Returns the contents of an export's config.json, given those of the original model.
  exported: Callable[[Json], Json] = lambda values: values
  # Returns the prefix of the text model's module names in the model that transformers builds from a config.json.
  module_prefix: Callable[[Json], str] = lambda values: 'model.'
  left_out: tuple[str, ...] = ()  # Files for parts that are not trained, which exports leave out.

  def read(self, values: Json, source: str) -> Architecture:
    """Return the architecture that the contents of a config.json describe.

    Args:
      values: the contents.
      source: name of the file, for error messages.

    Raises:
      UserError: something is missing, wrong or not supported; the message names it and `source`.
    """
    values = self.defaults | self.text(values, source)
    common = config_json.fields(values, source, self.activation_key)
    return Architecture(self.name, **common, **self.fields(values, common['layers'], source))

  def write(self, architecture: Architecture) -> Json:
    """Return the contents of a config.json from which transformers builds the same model."""
    common = config_json.written(architecture, self.model_types[-1], self.writer, self.activation_key)
    return common | self.entries(architecture)
