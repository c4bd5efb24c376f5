"""All settings of a run or a service: typed, documented and validated.

Settings have the names of the reference implementation (lasgroup/SDPO: its sections `actor`, `rollout`, `trainer` …) if
it has them, otherwise the usual names of the field. A file under `configs/` builds a `Config`; `--config.a.b=value`
changes one setting.
"""

from sdpo_jax.config.locations import beside as beside
from sdpo_jax.config.schema import CartridgeConfig as CartridgeConfig
from sdpo_jax.config.schema import DataConfig as DataConfig
from sdpo_jax.config.schema import EnvironmentsConfig as EnvironmentsConfig
from sdpo_jax.config.schema import FeedbackEndpointConfig as FeedbackEndpointConfig
from sdpo_jax.config.schema import HttpGraderConfig as HttpGraderConfig
from sdpo_jax.config.schema import JudgeConfig as JudgeConfig
from sdpo_jax.config.schema import LoraConfig as LoraConfig
from sdpo_jax.config.schema import MeshConfig as MeshConfig
from sdpo_jax.config.schema import ModelConfig as ModelConfig
from sdpo_jax.config.schema import OptimizerConfig as OptimizerConfig
from sdpo_jax.config.schema import SamplingConfig as SamplingConfig
from sdpo_jax.config.schema import SandboxConfig as SandboxConfig
from sdpo_jax.config.schema import SelfDistillationConfig as SelfDistillationConfig
from sdpo_jax.config.schema import ServeConfig as ServeConfig
from sdpo_jax.config.schema import TeacherEndpointConfig as TeacherEndpointConfig
from sdpo_jax.config.schema import TrainerConfig as TrainerConfig
from sdpo_jax.config.serve import GuardsConfig as GuardsConfig
from sdpo_jax.config.serve import HttpConfig as HttpConfig
from sdpo_jax.config.serve import LearningConfig as LearningConfig
from sdpo_jax.config.serve import LimitsConfig as LimitsConfig
from sdpo_jax.config.validated import Config as Config
