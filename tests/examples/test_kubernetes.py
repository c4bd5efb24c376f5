"""The manifests of examples/kubernetes/ against their schemas, each other and the service. No cluster is needed."""

import collections
import http.client
import http.server
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import tomllib
import types

import kubernetes_validate
from prometheus_client import parser
import pytest
import yaml

from sdpo_jax.command import _OVERRIDE
from sdpo_jax.config import config_files
from sdpo_jax.serving.errors import NotReady
from sdpo_jax.serving.store import leases
from sdpo_jax.serving.web import error_responses, server
from sdpo_jax.serving.web.telemetry import Metrics
from sdpo_jax.serving.worker import Worker
from tests import tiny

FOLDER = tiny.REPOSITORY / 'examples' / 'kubernetes'
FILES = {name: list(yaml.safe_load_all((FOLDER / name).read_text())) for name in ('service.yaml', 'balancer.yaml')}
DOCUMENTS = [document for documents in FILES.values() for document in documents]
UNKNOWN = {'PodMonitoring'}  # Kinds of Managed Prometheus, whose schemas are in clusters only.
NGINX = shutil.which('nginx', path=f'{os.environ.get("PATH", "")}:/usr/sbin')
PLACES = 6


def one(kind, name='sdpo'):
  [found] = [each for each in DOCUMENTS if (each['kind'], each['metadata']['name']) == (kind, name)]
  return found


SET = one('StatefulSet')
POD = SET['spec']['template']['spec']
[SERVE] = POD['containers']
SETTINGS = {}
for argument in SERVE['args']:
  name, _, text = argument.partition('=')
  SETTINGS[name] = text


def test_every_file_is_checked():
  assert {path.name for path in FOLDER.iterdir()} == {'Dockerfile', *FILES}


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda each: f'{each["kind"]}-{each["metadata"]["name"]}')
def test_manifests_fit_their_schemas(document):
  if document['kind'] not in UNKNOWN:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_field_does_not_fit_the_schemas():
  wrong = json.loads(json.dumps(SET))
  wrong['spec']['template']['spec']['containers'][0]['port'] = []
  with pytest.raises(kubernetes_validate.ValidationError):
    kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_documents_name_each_other_as_they_are():
  assert {each['metadata']['namespace'] for each in DOCUMENTS} == {'serving'}
  pods = {}
  for kind in ('StatefulSet', 'Deployment'):
    for each in (document for document in DOCUMENTS if document['kind'] == kind):
      labels = each['spec']['template']['metadata']['labels']
      assert each['spec']['selector']['matchLabels'] == labels
      pods[json.dumps(labels)] = each['spec']['template']['spec']
  chosen = collections.Counter()
  for each in DOCUMENTS:
    selector = each.get('spec', {}).get('selector', {})
    labels = json.dumps(selector.get('matchLabels', selector))
    if each['kind'] in ('Service', 'PodDisruptionBudget', 'PodMonitoring'):
      assert labels in pods, each['metadata']
      chosen[each['kind']] += 1
    if each['kind'] == 'Service':
      named = {port['name'] for container in pods[labels]['containers'] for port in container['ports']}
      assert {port['targetPort'] for port in each['spec']['ports']} <= named
  assert chosen == {'Service': 3, 'PodDisruptionBudget': 2, 'PodMonitoring': 1}
  for pod in pods.values():
    volumes = [each['name'] for each in pod['volumes']]
    if pod is POD:
      volumes += [each['metadata']['name'] for each in SET['spec']['volumeClaimTemplates']]
    mounts = [mount['name'] for each in pod['containers'] for mount in each['volumeMounts']]
    assert set(mounts) == set(volumes) and len(volumes) == len(set(volumes))
  assert (
    SET['spec']['serviceName'] == one('Service')['metadata']['name'] and one('Service')['spec']['clusterIP'] == 'None'
  )
  assert POD['serviceAccountName'] == one('ServiceAccount')['metadata']['name']
  scaled = one('HorizontalPodAutoscaler')['spec']
  assert scaled['scaleTargetRef'] == {'apiVersion': SET['apiVersion'], 'kind': 'StatefulSet', 'name': 'sdpo'}
  assert 'replicas' not in SET['spec'] and 2 <= scaled['minReplicas'] < scaled['maxReplicas'] == PLACES


def test_tpus_are_asked_for_as_the_slice_has_them():
  chips = {part: SERVE['resources'][part]['google.com/tpu'] for part in ('requests', 'limits')}
  rows, columns = POD['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  assert set(chips.values()) == {int(rows) * int(columns)}


def test_arguments_are_settings_of_the_service():
  known = {'$(POD_NAME)': 'sdpo-0', '$(DATABASE_URL)': 'postgresql://sdpo@postgres/sdpo'}
  assert {f'$({each["name"]})' for each in SERVE['env']} == set(known)
  overrides = []
  for name, text in list(SETTINGS.items())[1:]:
    for variable, value in known.items():
      text = text.replace(variable, value)
    overrides.append((_OVERRIDE.fullmatch(name)[1], text))
  config = config_files.read(SETTINGS['--config'], overrides).validate(trains=False)
  http = config.serve.http
  assert (http.host, [http.port]) == ('0.0.0.0', [port['containerPort'] for port in SERVE['ports']])
  assert http.url == f'http://sdpo-0.{SET["spec"]["serviceName"]}:{http.port}'
  assert config.serve.store.database == http.keys == known['$(DATABASE_URL)']
  assert config.serve.store.root.startswith('gs://')
  [queue] = one('HorizontalPodAutoscaler')['spec']['metrics']
  assert int(queue['pods']['target']['averageValue']) == config.serve.rows


def test_a_pod_is_given_the_time_to_drain():
  before, drain = SERVE['lifecycle']['preStop']['sleep']['seconds'], int(SETTINGS['--config.serve.http.drain_s'])
  assert POD['terminationGracePeriodSeconds'] >= before + drain + server._LAST_ANSWERS  # noqa: SLF001


def test_a_paused_pod_is_out_when_its_leases_end():
  probe = SERVE['readinessProbe']
  seconds = probe['periodSeconds'] + probe['failureThreshold'] * max(probe['periodSeconds'], probe['timeoutSeconds'])
  assert seconds <= leases.LIFETIME


def test_probes_and_metrics_are_routes_and_need_what_they_are_sent():
  source = (tiny.REPOSITORY / 'sdpo_jax' / 'serving' / 'web' / 'app.py').read_text()
  [endpoint] = one('PodMonitoring')['spec']['endpoints']
  paths = [SERVE[probe]['httpGet']['path'] for probe in ('livenessProbe', 'readinessProbe')]
  assert paths == ['/healthz', '/readyz']
  assert all(f"@handled('GET', '{path}'" in source for path in (*paths, endpoint['path']))
  assert '--config.serve.http.allowed_hosts' not in SETTINGS  # Probes name the address of the pod as Host.
  key = endpoint['authorization']['credentials']['secret']['name']
  assert one('Role', 'sdpo-metrics')['rules'][0]['resourceNames'] == [key]


def test_replicas_are_scaled_by_a_metric_that_the_service_has():
  worker = Worker(lambda: None, lambda name: {}, announce=lambda line: None)
  present = types.SimpleNamespace(
    endpoint=None,
    worker=worker,
    store=types.SimpleNamespace(stats={}),
    allowances=types.SimpleNamespace(today=dict),
  )
  lifetime = types.SimpleNamespace(present=present, under_way=0, ready=True)
  known = {
    family.name: family.type for family in parser.text_string_to_metric_families(Metrics(lifetime).text().decode())
  }
  [queue] = one('HorizontalPodAutoscaler')['spec']['metrics']
  source, name, kind = queue['pods']['metric']['name'].split('|')
  assert source == 'prometheus.googleapis.com' and known[name] == kind == 'gauge'


def test_the_image_has_what_the_service_needs():
  lines = (FOLDER / 'Dockerfile').read_text().replace('\\\n', ' ').splitlines()
  steps = [shlex.split(line) for line in lines if line and not line.startswith('#')]
  by_name = collections.defaultdict(list)
  for name, *rest in steps:
    by_name[name].append(rest)
  assert re.fullmatch(r'python:3\.1[12]-slim', by_name['FROM'][0][0])
  copied = [path for *sources, _ in by_name['COPY'] for path in sources]
  assert all(list(tiny.REPOSITORY.glob(path)) for path in copied)
  project = tomllib.loads((tiny.REPOSITORY / 'pyproject.toml').read_text())
  assert {'sdpo_jax', 'models', 'launch', 'configs', project['project']['readme']} <= set(copied)
  assert set(project['project']['license-files']) <= set(copied)
  [extras] = [set(word.strip('.[]').split(',')) for word in by_name['RUN'][0] if word.startswith('.[')]
  assert extras == {'postgres', 'tpu'} <= project['project']['optional-dependencies'].keys()
  assert int(by_name['USER'][0][0]) == POD['securityContext']['runAsUser'] > 0
  assert by_name['ENTRYPOINT'] == [['[sdpo,', 'serve]']] and 'sdpo' in project['project']['scripts']


def test_docs_make_the_secrets_that_the_manifests_name():
  page = (tiny.REPOSITORY / 'docs' / 'serving.md').read_text()
  made = {name: key for name, key in re.findall(r'create secret generic ([\w-]+) [^\n]*--from-\w+=(\w+)', page)}
  [url] = [each['valueFrom']['secretKeyRef'] for each in SERVE['env'] if 'secretKeyRef' in each['valueFrom']]
  secret = one('PodMonitoring')['spec']['endpoints'][0]['authorization']['credentials']['secret']
  assert made == {url['name']: url['key'], secret['name']: secret['key']}
  assert (
    'kubectl create namespace serving\n' in page
    and 'examples/kubernetes/Dockerfile' in page
    and 'No cluster was at hand' in page
  )


# --- The balancer ---


CONFIG = one('ConfigMap', 'balancer')['data']['nginx.conf']


def test_the_balancer_knows_every_replica():
  namespace, port = SET['metadata']['namespace'], SETTINGS['--config.serve.http.port']
  servers = re.findall(r'server (\S+) resolve', CONFIG)
  service = SET['spec']['serviceName']
  assert servers == [f'sdpo-{n}.{service}.{namespace}.svc.cluster.local:{port}' for n in range(PLACES)]
  [container] = one('Deployment', 'balancer')['spec']['template']['spec']['containers']
  assert set(re.findall(r'listen (\d+)', CONFIG)) == {str(port['containerPort']) for port in container['ports']}
  assert f'location = {container["readinessProbe"]["httpGet"]["path"]} {{' in CONFIG


class Replica(http.server.BaseHTTPRequestHandler):
  """Answers with its own port and the name by which it was called."""

  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    said = json.dumps({'port': self.server.server_port, 'host': self.headers['Host'], 'path': self.path}).encode()
    status = {'/fails': 503, '/late': 504}.get(self.path, 200)
    self.send_response(status)
    self.send_header('Retry-After', '7')
    self.send_header('Connection', 'keep-alive' if status == 200 else 'close')
    self.send_header('Content-Length', str(len(said)))
    self.end_headers()
    self.wfile.write(said)

  def log_message(self, *args):
    pass


@pytest.fixture
def balancer(request, tmp_path):
  """Run NGINX as configured, with names of a cluster replaced, before replicas of which the last one is not there.

  A parameter replaces the time within which a replica must answer.
  """
  if NGINX is None:
    pytest.skip('nginx is not installed, which parses the configuration of the balancer')
  replicas = [http.server.ThreadingHTTPServer(('127.0.0.1', 0), Replica) for _ in range(PLACES - 1)]
  with socket.socket() as free, socket.socket() as nobody:
    for each in (free, nobody):
      each.bind(('127.0.0.1', 0))
    ports = [each.server_port for each in replicas] + [nobody.getsockname()[1]]
    listening = free.getsockname()[1]
  text = CONFIG.replace('/tmp/', f'{tmp_path}/').replace('/dev/stderr', f'{tmp_path}/log')
  text = re.sub(r'resolver \S+', 'resolver 127.0.0.1', text)
  # Without `resolve`, which NGINX of Debian 12 does not know.
  text = re.sub(r'sdpo-(\d)\S+ resolve', lambda found: f'127.0.0.1:{ports[int(found[1])]}', text)
  text = text.replace('listen 8080', f'listen 127.0.0.1:{listening}').replace(
    'worker_processes auto', 'worker_processes 1'
  )
  text = text.replace('proxy_read_timeout 310s', f'proxy_read_timeout {getattr(request, "param", "310s")}')
  (tmp_path / 'nginx.conf').write_text(text)
  command = [NGINX, '-p', tmp_path, '-e', tmp_path / 'log', '-c', tmp_path / 'nginx.conf']
  parsed = subprocess.run([*command, '-t'], capture_output=True, text=True, check=False)
  assert parsed.returncode == 0, parsed.stderr
  threads = [threading.Thread(target=each.serve_forever, args=(0.05,)) for each in replicas]
  for thread in threads:
    thread.start()
  try:
    subprocess.run(command, check=True)  # It is listening when this returns.
    try:
      yield types.SimpleNamespace(port=listening, replicas=replicas)
    finally:
      subprocess.run([*command, '-s', 'stop'], check=True)
  finally:
    for each, thread in zip(replicas, threads, strict=True):
      each.shutdown(), each.server_close(), thread.join()


def said_by(balancer, method, path):
  connection = http.client.HTTPConnection('127.0.0.1', balancer.port, timeout=30)
  connection.request(method, path, '{}' if method == 'POST' else None, {'Host': 'sdpo.example.com'})
  answer = connection.getresponse()
  content = answer.read()
  connection.close()
  return answer.status, answer.headers.get_all('Retry-After'), answer.headers['Content-Type'], content


def check_that_none_is_ready(balancer):
  for method in ('POST', 'GET'):  # NGINX sends only the latter to the other replicas, too.
    status, wait, kind, content = said_by(balancer, method, '/v1/models')
    assert (status, wait, kind) == (503, ['1'], 'application/json')
    error = json.loads(content)['error']
    for path in ('/v1/continual/adapters', '/v1/models'):
      said = error_responses.failure(NotReady('', retry_after=1.0), path, '').body
      assert error == error | said['error'] | {'message': error['message']}


def test_that_a_replica_fails_and_that_there_is_none_are_said_as_the_service_says_it(balancer):
  for path, failed in (('/fails', 503), ('/late', 504)):
    status, wait, _, content = said_by(balancer, 'GET', path)
    assert (status, wait, json.loads(content)['path']) == (failed, ['7'], path)
  for each in balancer.replicas:
    each.shutdown(), each.server_close()
  check_that_none_is_ready(balancer)


@pytest.mark.parametrize('balancer', ['50ms'], indirect=True)
def test_that_replicas_are_paused_is_said_as_the_service_says_it(balancer):
  for each in balancer.replicas:
    each.shutdown()  # Its socket still takes connections, and nobody answers them.
  check_that_none_is_ready(balancer)


def test_requests_for_an_adapter_go_to_one_replica(balancer):
  def ask(path, **headers):
    connection = http.client.HTTPConnection('127.0.0.1', balancer.port, timeout=30)
    connection.request('GET', path, headers={'Host': 'sdpo.example.com'} | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return json.loads(content) if answer.status == 200 else answer.status

  def ports(asked):
    return [ask(path, **headers)['port'] for path, headers in asked]

  adapters = [f'ad-{n:016x}' for n in range(24)]
  first = ports((f'/v1/continual/adapters/{each}', {}) for each in adapters)
  assert len(set(first)) > 1  # They also take the adapters of the one that is not there.
  assert first == ports(
    (f'/v1/continual/adapters/{each}/versions?limit=1', {'Authorization': each}) for each in adapters
  )
  assert first == ports(('/v1/models', {'X-Adapter': each, 'Authorization': 'x'}) for each in adapters)
  key = [ports((path, {name: 'Bearer a'}) for path in ('/v1/models', '/x')) for name in ('Authorization', 'X-API-Key')]
  assert len(set(sum(key, []))) == 1
  assert len(set(ports(('/v1/models', {'Authorization': f'Bearer {n}'}) for n in range(24)))) > 1
  plain = ask('/readyz')
  assert plain == {'host': 'localhost', 'path': '/readyz', 'port': plain['port']}
  assert ask('/metrics') == 404 and ask('/balancer', Host='10.0.0.1') == 204
  assert ask('/v1/models', Host='attacker.example') == 421
