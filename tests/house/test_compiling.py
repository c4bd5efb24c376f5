"""Quick compilation is undone where a test is about the programs of users."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests import compiling, tiny


def lowered() -> jax.stages.Lowered:
  """Return a program that the flags change: fused loops, a product, a reduction."""
  x = jax.ShapeDtypeStruct((64, 48), jnp.float32)
  return jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x.T) * jax.nn.softmax(x @ x.T)))).lower(x)


def facts(compiled: jax.stages.Compiled) -> list:
  """Its instructions, without where they come from, and its temporary memory."""
  instructions = [line for line in compiled.as_text().splitlines() if ' = ' in line]
  return [re.sub(r', metadata={.*?}', '', line) for line in instructions] + [
    compiled.memory_analysis().temp_size_in_bytes
  ]


def test_options_for_a_program_are_the_defaults_of_a_process_without_the_flags():
  program = (
    'import json; from tests.house import test_compiling as t; print(json.dumps(t.facts(t.lowered().compile())))'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=compiling.users_environment(),
    cwd=tiny.REPOSITORY,
    capture_output=True,
    text=True,
    check=True,
  )
  expected = json.loads(done.stdout.splitlines()[-1])
  assert facts(compiling.compile_as_users(lowered())) == expected
  with compiling.without_cache():
    assert facts(lowered().compile()) != expected


@pytest.mark.slow  # So are all other tests with this marker.
@pytest.mark.as_users
def test_a_marked_test_runs_without_the_flags():
  assert compiling.FLAGS not in os.environ.get('XLA_FLAGS', '')
  assert not compiling.users_options()
