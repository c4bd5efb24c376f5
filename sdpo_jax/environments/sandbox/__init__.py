"""A place to run model-written code: nothing of the machine, limits on everything, a fresh process for every
program.
"""

from sdpo_jax.environments.sandbox.sandbox import Job, Limits, Report, Sandbox

__all__ = ['Job', 'Limits', 'Report', 'Sandbox']
