"""No [tokens, vocabulary] array exists in the compiled objective, forward or backward."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from sdpo_jax.objective.log_probs import token_log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.types import TeacherSignal
from tests.compiling import compile_as_users

VOCAB, WIDTH, CHUNK = 20_000, 16, 32


@functools.cache
def compiled(tokens, unembedding_gradient, full=False, entropy=True):
  config = ObjectiveConfig(chunk_size=CHUNK, vocab_block=1024, distillation_topk=None if full else 50)

  def value(trained, fixed):
    x = trained | fixed
    teacher = TeacherSignal(hidden=x['teacher'], unembedding=x['teacher_unembedding'])
    terms = {name: x['mask'] for name in ('policy_coef', 'old_log_probs', 'advantages')}
    terms['entropy_coef'] = x['mask'] if entropy else None
    arrays = x['hidden'], x['unembedding'], teacher, x['targets'], x['mask'], x['mask']
    return objective(*arrays, config=config, **terms)

  states = jax.ShapeDtypeStruct((2, tokens // 2, WIDTH), jnp.float32)
  matrix = jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32)

  def row(dtype):
    return jax.ShapeDtypeStruct((2, tokens // 2), dtype)

  trained = {'hidden': states}
  fixed = {'teacher': states, 'teacher_unembedding': matrix, 'targets': row(jnp.int32), 'mask': row(jnp.float32)}
  (trained if unembedding_gradient else fixed)['unembedding'] = matrix
  return compile_as_users(jax.jit(jax.value_and_grad(value, has_aux=True)).lower(trained, fixed))


@pytest.mark.parametrize('full', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_is_a_chunk_and_does_not_grow_with_the_tokens(full):
  tokens = 1024
  program, longer = compiled(tokens, True, full), compiled(2 * tokens, True, full)
  temporary = program.memory_analysis().temp_size_in_bytes
  whole = 4 * tokens * VOCAB
  chunk = 4 * CHUNK * VOCAB
  assert temporary < (5 if full else 2.5) * chunk + 4 * VOCAB * WIDTH < whole / 5
  # What may grow: a few arrays of [tokens, WIDTH] and of [tokens].
  assert longer.memory_analysis().temp_size_in_bytes - temporary < 4 * tokens * (2 * WIDTH + 60)
  assert longer.memory_analysis().temp_size_in_bytes - temporary < whole / 100
  shapes = re.findall(r'\w+\[([\d,]+)\]', program.as_text())
  sizes = [[int(n) for n in shape.split(',')] for shape in shapes]
  rows = max(size for shape in sizes if VOCAB in shape for size in shape if size != VOCAB)
  assert rows == max(CHUNK, WIDTH)


@pytest.mark.slow
def test_an_unembedding_that_is_not_trained_costs_nothing():
  """Neither its gradient's memory nor its matrix product."""
  with_it, without = compiled(1024, True), compiled(1024, False)

  def product(program):
    return len(re.findall(r'dot_general|custom_call_target="__ynn|kind=kCustom', program.as_text()))

  assert product(without) < product(with_it)

  def held(program):
    return program.memory_analysis().temp_size_in_bytes + program.memory_analysis().output_size_in_bytes

  assert held(with_it) - held(without) > 0.9 * 4 * VOCAB * WIDTH


@pytest.mark.slow
def test_without_it_the_logits_of_a_chunk_are_not_kept_either():
  """Only a span of them for the top K, whatever the vocabulary; the entropy bonus needs them again."""
  program, keeping = compiled(1024, False, entropy=False), compiled(1024, False)
  assert f'[{CHUNK},{VOCAB}]' not in program.as_text() and f'[{CHUNK},{VOCAB}]' in keeping.as_text()
  assert program.memory_analysis().temp_size_in_bytes < 1.1 * 4 * CHUNK * VOCAB + 4 * 1024 * (2 * WIDTH + 60)


def test_forward_only_log_probs_hold_a_block():
  def program(tokens):
    states = jax.ShapeDtypeStruct((1, tokens, WIDTH), jnp.float32)
    matrix = jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    lowered = token_log_probs.lower(states, matrix, targets, chunk_size=CHUNK)
    return compile_as_users(lowered).memory_analysis()

  short, long = program(512).temp_size_in_bytes, program(1024).temp_size_in_bytes
  assert short < 4 * CHUNK * VOCAB / 2
  assert long - short < 4 * 512 * (2 * WIDTH + 20)
