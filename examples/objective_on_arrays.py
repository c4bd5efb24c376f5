"""The objective alone, on your own arrays: SDPO's divergence, its gradient, and per-token metrics.

  python examples/objective_on_arrays.py

Nothing else of the project is needed: no config, no model. Hidden states and unembedding take the place of logits,
which never exist for all tokens at once; if you have logits, pass them as hidden states, with the identity as
unembedding.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.types import TeacherSignal

B, T, D, V = 2, 5, 16, 101  # Rows, tokens of a completion, width, vocabulary.
keys = jax.random.split(jax.random.key(0), 4)
unembedding = jax.random.normal(keys[0], (V, D))
student_hidden = jax.random.normal(keys[1], (B, T, D))
# From the same model after a better prompt.
teacher_hidden = student_hidden + 0.5 * jax.random.normal(keys[2], (B, T, D))
completion = jax.random.randint(keys[3], (B, T), 0, V)
mask = jnp.ones((B, T)).at[1, 3:].set(0)  # The second completion has three tokens.

config = ObjectiveConfig(alpha=0.5, distillation_topk=20, distillation_add_tail=True, is_clip=2.0)


def loss_of(hidden):
  teacher = TeacherSignal(hidden=teacher_hidden, unembedding=unembedding)
  return objective(hidden, unembedding, teacher, completion, mask, mask / mask.sum(), config=config)


(loss, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(student_hidden)
print(f'Jensen-Shannon divergence, mean over {int(mask.sum())} tokens: {loss:.4f} nats')
print('of every token:')
print(np.asarray(aux['divergence']).round(3))
print('probability that the student gives to tokens outside its top 20:')
print(np.asarray(aux['student_tail']).round(3))

step = student_hidden - 5.0 * gradient
print(f'after a step against the gradient: {loss_of(step)[0]:.4f} nats')
