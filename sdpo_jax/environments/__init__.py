"""What is right: graders turn completions into scores and feedback; generators make endless questions.

Importing the package registers all of them.
"""

from sdpo_jax.environments import code as code
from sdpo_jax.environments import digits as digits
from sdpo_jax.environments import http_grader as http_grader
from sdpo_jax.environments import judge as judge
from sdpo_jax.environments import mathematics as mathematics
from sdpo_jax.environments import multiple_choice as multiple_choice
from sdpo_jax.environments import tool_use as tool_use
