"""The parameter table of a decoder, from its architecture and the tensor names of its family."""

from __future__ import annotations

import functools
import math

from sdpo_jax.models import parameters
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families.known_families import family_of


@functools.cache
def parameter_table(architecture: Architecture) -> parameters.Table:
  """Return every parameter of the model, in the order in which its files hold them."""
  a = architecture
  names = family_of(a).names
  layers, width, hidden, head_dim = a.layers, a.hidden_size, a.intermediate_size, a.head_dim
  entries = []

  def add(path, shape, axes, init, matrix=None, **more):
    stacked = axes[0] == 'layers'
    matrix = matrix or (shape[1:] if stacked else shape)
    entries.append(parameters.Parameter(tuple(path.split('.')), shape, axes, init, names[path], matrix, **more))

  def norm(path, shape, axes, matrix=None):
    # Weights to which 1 is added are initialised to 0.
    init = 'zeros' if a.norm_offset else 'ones'
    add(path, (layers, *shape), ('layers', *axes), init, matrix, compute=False)

  def matrix(path, shape, axes, inputs, bias):
    """Add a matrix of a layer, [*in, *out] here (`inputs` axes of in) and [out, in] in files, and a bias [*out]."""
    transposed = math.prod(shape[inputs:]), math.prod(shape[:inputs])
    add(path, (layers, *shape), ('layers', *axes), 'normal', transposed, transpose=True)
    if bias:
      outputs = (None if axis == 'embed' else axis for axis in axes[inputs:])
      add(f'{path}_bias', (layers, *shape[inputs:]), ('layers', *outputs), 'zeros', transposed[:1])

  vocabulary = dict(
    shape=(a.padded_vocab_size, width), axes=('vocab', 'embed'), init='normal', matrix=(a.vocab_size, width)
  )
  add('embedding', **vocabulary)
  if a.norm_placement in ('pre', 'both'):
    norm('layers.attention_norm', (width,), (None,))
  queries, keys = (a.heads, 'heads'), (a.kv_heads, 'kv_heads')
  for name, (heads, axis) in (('query', queries), ('key', keys), ('value', keys)):
    matrix(f'layers.attention.{name}', (width, heads, head_dim), ('embed', axis, 'head_dim'), 1, a.qkv_bias)
  matrix('layers.attention.output', (a.heads, head_dim, width), ('heads', 'head_dim', 'embed'), 2, a.output_bias)
  for name, (heads, axis) in (('query', queries), ('key', keys)):
    if a.query_key_norm == 'head':
      norm(f'layers.attention.{name}_norm', (head_dim,), ('head_dim',))
    elif a.query_key_norm == 'projection':
      norm(f'layers.attention.{name}_norm', (heads, head_dim), (axis, 'head_dim'), (heads * head_dim,))
  if a.norm_placement in ('post', 'both'):
    norm('layers.attention_post_norm', (width,), (None,))
  if a.norm_placement in ('pre', 'both'):
    norm('layers.mlp_norm', (width,), (None,))
  for name in ('gate', 'up'):
    matrix(f'layers.mlp.{name}', (width, hidden), ('embed', 'mlp'), 1, a.mlp_bias)
  matrix('layers.mlp.down', (hidden, width), ('mlp', 'embed'), 1, a.mlp_bias)
  if a.norm_placement in ('post', 'both'):
    norm('layers.mlp_post_norm', (width,), (None,))
  add('final_norm', (width,), (None,), 'zeros' if a.norm_offset else 'ones', compute=False)
  if not a.tied:
    add('unembedding', **vocabulary)
  return tuple(entries)
