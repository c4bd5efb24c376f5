from sdpo_jax.config.validated import Config as Config
from sdpo_jax.errors import UserError as UserError
from sdpo_jax.interface import Callback as Callback
from sdpo_jax.interface import Step as Step
from sdpo_jax.interface import evaluate as evaluate
from sdpo_jax.interface import export as export
from sdpo_jax.interface import generator as generator
from sdpo_jax.interface import load_config as load_config
from sdpo_jax.interface import read_metrics as read_metrics
from sdpo_jax.interface import steps as steps
from sdpo_jax.interface import train as train
from sdpo_jax.training.loop import Result as Result

__version__: str
