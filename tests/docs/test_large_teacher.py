"""The commands of docs/large_teacher.md, with a service of a tiny model as vLLM, and another one as the student."""

import re

import pytest

from tests import tiny
from tests.docs import pages
from tests.local_server import free_port
from tests.serving import service_world

CONFIG = """
import pathlib
from tests.serving import service_world

def get_config():
  config = service_world.make_config(pathlib.Path({model!r}), pathlib.Path({root!r}))
  config.serve.score_buckets = ()
  config.serve.limits.max_logprobs = 100
  config.serve.http.port = {port}
  return config
"""


@pytest.mark.docs
def test_the_page_works_with_two_processes(tmp_path):
  models = {'teacher': tiny.make_model(tmp_path / 'large', seed=1, num_hidden_layers=3)}
  models['student'] = service_world.model_folder(tmp_path / 'small')
  ports = {name: free_port() for name in models}
  for name, model in models.items():
    text = CONFIG.format(model=str(model), root=str(tmp_path / f'{name}_root'), port=ports[name])
    (tmp_path / f'{name}.py').write_text(text)
  page = (tiny.REPOSITORY / 'docs' / 'large_teacher.md').read_text()
  instead = {
    'vllm serve Qwen/Qwen2.5-32B-Instruct --max-logprobs=100 --port=8000 &   #': (
      'python -m launch.serve --config=teacher.py --config.serve.model_name=Qwen/Qwen2.5-32B-Instruct &   #'
    ),
    'configs/lora.py:model=qwen2_5_3b,task=chemistry': 'student.py',
    'tokenizer=Qwen/Qwen2.5-32B-Instruct': f'tokenizer={models["teacher"]}',
    'localhost:8000': f'localhost:{ports["teacher"]}',
    'localhost:8420': f'localhost:{ports["student"]}',
    '<!-- not run: needs a GPU -->\n': '',
  }
  for shown, run in instead.items():
    assert shown in page, shown
    page = page.replace(shown, run)
  assert not re.search(r'qwen2_5_3b|vllm serve|:8000|:8420', page)
  well = f'\n```bash\ncurl -sf localhost:{ports["student"]}/readyz | grep closed\n```\n'
  (tmp_path / 'page.md').write_text(page + well)
  pages.run_as_shown(str(tmp_path / 'page.md'), tmp_path)
