"""The page of the service: what is sent, and, in a browser, what comes of a correction, a session and an undo."""

import json
import pathlib
import re
import types

import httpx
import pytest
from starlette.testclient import TestClient

from benchmarks import chromium, console_clicks
from sdpo_jax.config import Config, ServeConfig
from sdpo_jax.serving.web import console, pages
from sdpo_jax.serving.web.admission import Lifetime
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.keys import KeyFile, add
from tests.serving import openai_server, session_world

FILES = ('/console', '/console.css', '/console.js')


@pytest.fixture(scope='module')
def doors(tmp_path_factory):
  """Yield the same routes without keys and with them; the service behind them is not there yet."""
  path = tmp_path_factory.mktemp('keys') / 'keys.jsonl'
  add(path, 'ada', 'test')
  keys = KeyFile(path)
  settings = Config().serve
  with (
    TestClient(make_app(None, settings, lifetime=Lifetime(None)), base_url='http://localhost') as anybody,
    TestClient(make_app(None, settings, keys, lifetime=Lifetime(None)), base_url='http://localhost') as keyed,
  ):
    yield anybody, keyed


@pytest.mark.parametrize('path', FILES)
def test_the_page_needs_no_key_and_asks_nobody_else(doors, path):
  for client in doors:
    answer = client.get(path)
    assert answer.status_code == 200 and answer.headers['content-security-policy'] == console.POLICY
    assert answer.headers['x-frame-options'] == 'DENY'
    assert not re.search(r'(?:src|href|url)[=(]\s*["\']?(?:https?:)?//', answer.text)
  assert doors[0].get('/', follow_redirects=False).headers['location'] == 'console'


def test_the_page_is_not_for_other_hosts(doors):
  assert doors[0].get('/console', headers={'Host': 'evil.example'}).status_code == 403


def test_what_models_and_users_wrote_is_never_markup():
  script = (pathlib.Path(console.__file__).parent / 'console.js').read_text()
  assert not re.search(r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(', script)


@pytest.mark.parametrize(
  'shown, wrong', [('rm {"p": 12345678901234567890}', False), ('rm {"p": 12345678901234567000}', True)]
)
def test_random_clicks_see_what_was_decided_on_but_not_shown(shown, wrong):
  turn = {'n': 0, 'calls': [{'name': 'rm', 'arguments': {'p': 12345678901234567890}}], 'decision': {'kind': 'approve'}}
  answers = {'/v1/continual/adapters/a': {'name': 'mine'}, '/v1/continual/adapters/a/sessions/s': {'turns': [turn]}}
  transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers[request.url.path]))
  path = 'v1/continual/adapters/a/sessions/s/turns/0/decision'
  noted = {'path': path, 'what': 'decision', 'calls': [shown], 'adapter': 'mine', 'status': 200}
  counts = {'decision': 0, 'refused': 0}
  with httpx.Client(transport=transport, base_url='http://localhost') as http:
    assert (console_clicks.misdirected(http, noted, counts) is not None) == wrong and counts['decision'] == 1
    assert console_clicks.misdirected(http, noted | {'status': 409}, counts) is None and counts['refused'] == 1


class Visitor:
  """Somebody who looks at the page and presses its buttons."""

  def __init__(self, page):
    self.page = page

  def write(self, selector: str, text: str) -> None:
    self.page.evaluate(f'document.querySelector({selector!r}).value = {json.dumps(text)}')

  def press(self, text: str, then: str) -> None:
    """Presses the last button with this text that is shown, as soon as it can be; waits for what comes of it."""
    self.page.until(f"""(() => {{
      const found = [...document.querySelectorAll('button')].filter((button) => button.offsetParent &&
        button.textContent.startsWith({text!r}) && !button.disabled && !button.closest('[inert]')).at(-1);
      found?.click();
      return !!found;
    }})()""")
    self.page.until(f"document.querySelector('#error:not([hidden])') || ({then})")
    assert self.page.evaluate("document.querySelector('#error').hidden"), self.read('#error')

  def read(self, selector: str) -> str:
    return self.page.evaluate(f'document.querySelector({selector!r}).innerText')

  def status(self, wanted: str) -> str:
    """Return the condition that the newest turn has this status."""
    return f"document.querySelector('#turns > li:last-child .status').textContent === {wanted!r}"

  def buttons(self) -> list[str]:
    """Return the texts of the buttons of the turns."""
    shown = "[...document.querySelectorAll('#turns button')].filter((button) => button.offsetParent)"
    return self.page.evaluate(f'{shown}.map((button) => button.textContent)')

  def shows(self, count: int) -> str:
    """Return the condition that so many turns are shown."""
    return f"document.querySelectorAll('#turns > li').length === {count}"

  def open_session(self, name: str, tools=session_world.TOOLS) -> None:
    """Make an adapter, or choose it, and open a session of it."""
    if name not in self.read('#adapters'):
      self.write('#name', name)
      self.page.evaluate("document.querySelector('#create').requestSubmit()")
      chosen = "document.querySelector('#adapters [aria-current=true]')"
      self.page.until(f'{chosen}?.textContent.startsWith({name!r})')
    self.press('Session', "!document.querySelector('#session').hidden")
    self.write('#tools', json.dumps(tools))
    self.press('Open a session', "document.querySelector('#say').offsetParent")

  def say(self, count: int = 1) -> None:
    """Send a message, and wait for so many turns."""
    self.write('#message', 'x')
    self.press('Send', self.shows(count))


LARGE = '{"name": "g", "arguments": {"p": 12345678901234567890, "q": [-0.0, 0.1]}}'
HIDDEN = '{"name": "g\u200b", "arguments": {"p": "a\u202eb\u3164 אבג"}}'
# Room for answers and conversations of bytes.
ROOM = {'prompt_buckets': (384,), 'response_buckets': (128,), 'teacher_buckets': (384,), 'score_buckets': (512,)}
ROOM |= {'cartridges': 0, 'cartridge_slots': ServeConfig.cartridge_slots}  # They take all positions of the model.
# Answers whose addresses match `holding` wait in `held`; `seen` is whether choices were inert when they came.
HOLD = """
window.held = []; window.holding = null;
const real = window.fetch;
window.fetch = async (path, options) => {
  const answer = await real(path, options);
  if (window.holding && new RegExp(window.holding).test(path)) await new Promise((go) => window.held.push(go));
  return answer;
};
new MutationObserver(() => { window.seen ??= document.querySelector('#turns .choices')?.inert; })
  .observe(document, { childList: true, subtree: true });
"""


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
  """Yield a service whose model says what a test wants, behind a port, and a page of a browser."""
  if chromium.installed() is None:
    pytest.skip('there is no Chromium')
  with (
    session_world.world(tmp_path_factory.mktemp('page'), **ROOM) as (service, script),
    openai_server.behind_port(service, service.config) as running,
    chromium.opened(chromium.installed()) as page,
  ):
    page.call('Page.addScriptToEvaluateOnNewDocument', source=HOLD)
    yield types.SimpleNamespace(page=page, running=running, script=script)


@pytest.fixture
def visitor(browser):
  """Yield somebody who opens the page for the first time; what the page asked of others and complained of is empty."""
  browser.script.forget()
  browser.page.events.clear()
  browser.page.open(f'{browser.running.url}/console')
  browser.page.evaluate('sessionStorage.clear()')
  browser.page.open(f'{browser.running.url}/console')
  yield Visitor(browser.page)
  assert browser.page.complaints() == []
  assert {address.split('/')[2] for address in browser.page.requested()} == {browser.running.url.split('/')[2]}


def known(browser, name: str) -> list[dict]:
  """Return the turns of all sessions of the adapter with this name, as the service knows them."""
  root = '/v1/continual/adapters'
  [adapter] = [each['id'] for each in browser.running.http.get(root).json()['adapters'] if each['name'] == name]
  sessions = browser.running.http.get(f'{root}/{adapter}/sessions').json()['sessions']
  found = [browser.running.http.get(f'{root}/{adapter}/sessions/{each["id"]}').json()['turns'] for each in sessions]
  return [turn for turns in found for turn in turns]


@pytest.mark.slow
def test_a_visitor_corrects_denies_edits_and_goes_back(browser, visitor):
  page, script = visitor.page, browser.script
  script_tag = '<img src=x onerror="document.title=1">\u202e'
  hostile = session_world.called('{"name": "g", "arguments": {"p": "\\u202e<b>\\u3164"}}')
  assert f'curl {browser.running.url}/v1/continual/adapters' in visitor.read('#welcome')
  visitor.press('Create a first adapter', "document.querySelector('#adapter-name').textContent === 'first'")
  assert page.evaluate("document.querySelector('#welcome').hidden && document.querySelector('#choose').hidden")
  page.evaluate('sessionStorage.clear()')
  page.open(f'{browser.running.url}/console')
  assert 'Choose an adapter' in visitor.read('#choose') and 'first' in visitor.read('#adapters')
  visitor.write('#name', 'mine')
  visitor.press('Create', "document.querySelector('#adapter-name').textContent === 'mine'")

  script.say(script_tag, 'no')
  visitor.write('#question', 'Hi')
  visitor.press('Ask', "document.querySelector('#answer-text').textContent.startsWith('<img src=x')")
  assert page.evaluate('document.title') != '1' and '\u202e' not in visitor.read('#answer-text')
  visitor.press('Ask', "document.querySelector('#answer-text').textContent === 'no'")
  visitor.write('#correction', 'yes')
  visitor.press('Learn', "document.querySelectorAll('#credit-tokens span').length === 3")
  assert 'version 0 became 1' in visitor.read('#credit-summary')

  script.say(*[session_world.called(session_world.GREP)] * 2, hostile)
  visitor.open_session('mine')
  visitor.say()
  visitor.write('#turns input', 'Use r.')
  visitor.press('Deny', visitor.shows(2))
  assert re.fullmatch(
    r'Learned in \d+\.\d s: version 2; “.+” is (less|more) likely \(\S+ → \S+\)', visitor.read('summary')
  )
  visitor.press('Edit', "!document.querySelector('#turns > li:last-child textarea').hidden")
  visitor.write('#turns > li:last-child textarea', '{"p": "y"}')
  visitor.press('Approve as edited', visitor.status('edited'))
  assert '"y"' in visitor.read('#turns > li:last-child pre') and '"x"' not in visitor.read('#turns > li:last-child pre')
  visitor.write('#turns > li:last-child form textarea', 'found')
  visitor.press('Continue', visitor.shows(3))
  assert '\\u202e<b>\\u3164' in visitor.read('#turns > li:last-child pre') and '\u202e' not in visitor.read('#turns')
  visitor.press('Versions', "document.querySelectorAll('#version-rows tr').length === 4")
  visitor.press('Undo to this', "document.querySelectorAll('#version-rows tr').length === 5")
  assert 'undo to 0' in visitor.read('#version-rows tr')
  assert visitor.read('#version-rows').count(', undone') == 3


@pytest.mark.slow
def test_no_random_click_decides_on_what_was_not_shown(browser, visitor):
  """A sample of `python -m benchmarks.console_clicks`; every call is another one."""
  numbers = iter(range(10**6))

  class Calls:
    def pop(self, at):
      call = {'name': 'gr'[next(numbers) % 2], 'arguments': {'p': next(numbers)}}
      return browser.running.service.tokenizer.encode(session_world.called(json.dumps(call)), add_special_tokens=False)

  def write(name, rng):
    texts = {
      'Create': f'a{next(numbers)}',
      'Open a session': json.dumps(session_world.TOOLS),
      'Send': 'x',
      'Deny': 'no',
    }
    return texts.get(name) or {'Continue': '1', 'Approve as edited': json.dumps({'p': f'{next(numbers)}'})}[name]

  browser.script._texts = Calls()  # noqa: SLF001 No end to what the model says.
  found = console_clicks.click_around(visitor.page, browser.running.url, decisions=3, latency=0.4, seed=1, write=write)
  assert found['wrong'] == [] and found['decision'] >= 2, found
  browser.page.events.clear()  # Refusals are among them.
  browser.page.open(f'{browser.running.url}/console')


@pytest.mark.slow
def test_a_late_turn_lands_in_its_own_session(browser, visitor):
  page = visitor.page
  browser.script.say(session_world.called(session_world.GREP), session_world.called(session_world.READ))
  visitor.open_session('slow')
  visitor.write('#message', 'x')
  page.evaluate("window.holding = '/turns$'")
  visitor.press('Send', 'window.held.length === 1')
  page.evaluate('window.holding = null')
  visitor.open_session('fast')
  page.evaluate('window.held.forEach((go) => go())')
  page.until('new Promise((go) => setTimeout(() => go(true), 200))')
  page.until("!document.querySelector('#say button').disabled")
  visitor.write('#message', 'x')
  visitor.press('Send', "document.querySelector('#turns > li:last-child pre')?.textContent.startsWith('r ')")
  assert page.evaluate("[...document.querySelectorAll('#turns pre')].map((call) => call.textContent[0])") == ['r']
  visitor.press('Approve', visitor.status('approved'))
  assert [turn['status'] for turn in known(browser, 'slow') + known(browser, 'fast')] == ['open', 'approved']
  visitor.press('slow', visitor.shows(1))
  assert visitor.read('#turns > li:last-child pre').startswith('g ')
  visitor.press('Approve', visitor.status('approved'))
  assert known(browser, 'slow')[0]['status'] == 'approved' and known(browser, 'fast')[0]['results'] == []


@pytest.mark.slow
def test_undo_is_of_the_adapter_whose_versions_are_shown(browser, visitor):
  root, http = '/v1/continual/adapters', browser.running.http
  for name, undone in (('long', 2), ('short', 1)):
    made = http.post(root, json={'name': name}).json()['id']
    for _ in range(undone):
      http.post(f'{root}/{made}/undo', json={'to': 0})
  page, rows = visitor.page, "document.querySelectorAll('#version-rows tr').length"
  page.open(f'{browser.running.url}/console')
  page.evaluate("window.holding = '/versions$'")
  visitor.press('long', "document.querySelector('#adapter-name').textContent === 'long'")
  visitor.press('Versions', 'window.held.length === 1')
  visitor.press('short', "document.querySelector('#adapter-name').textContent === 'short'")
  page.evaluate('window.held[0]()')
  page.until('new Promise((go) => setTimeout(() => go(true), 200))')
  visitor.press('Versions', 'window.held.length === 2')
  assert page.evaluate(rows) == 0  # And no way to undo to a version of the other adapter.
  page.evaluate('window.holding = null; window.held[1]()')
  page.until(f'{rows} === 2')
  visitor.press('Undo to this', "document.querySelectorAll('#version-rows tr').length === 3")
  versions = {each['name']: each['version'] for each in http.get(root).json()['adapters']}
  assert (versions['short'], versions['long']) == (2, 2)


@pytest.mark.slow
def test_every_digit_is_shown_edited_and_sent(browser, visitor):
  browser.script.say(session_world.called(LARGE))
  visitor.open_session('digits')
  visitor.say()
  wanted = json.loads(LARGE)['arguments']
  assert json.loads(visitor.read('#turns pre').removeprefix('g ')) == wanted
  visitor.press('Edit', "!document.querySelector('#turns textarea').hidden")
  assert json.loads(visitor.page.evaluate("document.querySelector('#turns textarea').value")) == wanted
  assert visitor.buttons() == ['Edit', 'Approve as edited', 'Deny']  # The call above is not what would be approved.
  visitor.write('#turns textarea', '{"p": 98765432109876543210}')
  visitor.press('Approve as edited', visitor.status('edited'))
  assert '98765432109876543210' in visitor.read('#turns pre') and '12345' not in visitor.read('#turns pre')
  assert known(browser, 'digits')[0]['decision']['arguments'] == {'p': 98765432109876543210}


@pytest.mark.slow
def test_what_is_hidden_or_reorders_is_seen_where_it_is_edited(browser, visitor):
  tools = [*session_world.TOOLS, {'type': 'function', 'function': {'name': 'g\u200b'}}]
  browser.script.say(session_world.called(HIDDEN))
  visitor.open_session('hidden', tools)
  visitor.say()
  visitor.press('Edit', "!document.querySelector('#turns textarea').hidden")
  box = visitor.page.evaluate("document.querySelector('#turns textarea').value")
  assert '\\u202e' in box and '\\u3164' in box and json.loads(box) == json.loads(HIDDEN)['arguments']
  assert not re.search('[\u202e\u3164\u200b]', box + visitor.read('#turns'))
  assert 'u{200b}' in visitor.page.evaluate("document.querySelector('#turns textarea').ariaLabel")
  lefts = visitor.page.evaluate("""(() => {
    const text = document.querySelector('#turns pre').firstChild;
    const from = text.data.indexOf('"p"');
    return [...text.data.slice(from, text.data.lastIndexOf('"'))].map((_, at) => {
      const range = document.createRange();
      range.setStart(text, from + at);
      range.setEnd(text, from + at + 1);
      return range.getBoundingClientRect().left;
    });
  })()""")
  assert lefts == sorted(lefts)
  assert (
    visitor.page.evaluate("getComputedStyle(document.querySelector('#turns textarea')).unicodeBidi") == 'bidi-override'
  )
  visitor.write('#turns textarea', '{"p": "a\u202eb"}')
  with pytest.raises(AssertionError, match='invisible'):
    visitor.press('Approve as edited', 'false')
  visitor.press('Approve as edited', visitor.status('edited'))
  labels = visitor.page.evaluate(
    "(({ placeholder, ariaLabel }) => placeholder + ariaLabel)(document.querySelector('.results textarea'))"
  )
  assert labels.count('u{200b}') == 2 and known(browser, 'hidden')[0]['decision']['arguments'] == {'p': 'a\u202eb'}


@pytest.mark.slow
def test_a_reload_loses_no_proposal_and_other_tabs_only_read(browser, visitor, monkeypatch):
  page = visitor.page
  browser.script.say(session_world.called(session_world.READ))
  visitor.open_session('again')
  visitor.say()
  page.open(f'{browser.running.url}/console')
  page.until(visitor.shows(1))
  assert visitor.read('#adapter-name') == 'again' and visitor.buttons() == ['Approve', 'Edit', 'Deny']
  tokens = page.evaluate('JSON.stringify(sessionStorage)')
  page.evaluate('sessionStorage.clear()')
  page.open(f'{browser.running.url}/console')
  visitor.press('again', "document.querySelector('#adapter-name').textContent === 'again'")
  visitor.press('Session', "document.querySelector('#sessions button')")
  visitor.press('Session', visitor.shows(1))
  assert visitor.buttons() == [] and 'Read only' in visitor.read('#session')
  assert not page.evaluate("document.querySelector('#say').offsetParent")
  page.evaluate(f'Object.assign(sessionStorage, JSON.parse({tokens!r}))')
  page.open(f'{browser.running.url}/console')
  visitor.press('Approve', visitor.status('approved'))
  page.open(f'{browser.running.url}/console')
  browser.script.say('Done.')
  page.until("document.querySelector('.results')")
  visitor.write('.results textarea', 'found')
  visitor.press('Continue', visitor.shows(2))
  assert [turn['status'] for turn in known(browser, 'again')] == ['approved', 'answered']
  monkeypatch.setattr(pages, 'MOST_LISTED', 1)
  page.open(f'{browser.running.url}/console')
  page.until(visitor.shows(2))


PAYLOADS = (
  '<img src=x onerror=hit()>',
  '<script>hit()</script>',
  '<svg onload=hit()>',
  '</pre></li><b onmouseover=hit()>',
  '<iframe src=javascript:hit()>',
  '"onfocus=hit() autofocus x="',
  "';hit();//",
  '${hit()}',
  '{{hit()}}',
  '<a href=javascript:hit()>',
  '<style>*{display:none}</style>',
  '<base href=//evil.example>',
  '<template><img src=x onerror=hit()>',
  '<!--><img src=x onerror=hit()>',
  '<details open ontoggle=hit()>',
  '<input onfocus=hit() autofocus>',
  '&lt;script&gt;hit()',
  '__proto__',
  '\u202e<b>',
)


@pytest.mark.slow
def test_nothing_of_what_a_model_or_a_client_wrote_runs(browser, visitor):
  """In every text of a session: title, message, tool, argument, what is said, fault, correction, result, label."""
  root, http = '/v1/continual/adapters', browser.running.http
  adapter = http.post(root, json={'name': 'hostile'}).json()['id']
  tokens = {}
  for payload in PAYLOADS:
    tools = [{'type': 'function', 'function': {'name': payload}}]
    opened = http.post(f'{root}/{adapter}/sessions', json={'title': payload, 'tools': tools}).json()
    at, headers = f'{root}/{adapter}/sessions/{opened["session"]["id"]}', {'X-Session-Token': opened['token']}
    tokens[f'sdpo_jax.token.{opened["session"]["id"]}'] = opened['token']
    called = session_world.called(json.dumps({'name': payload, 'arguments': {payload: payload}}))
    browser.script.say(payload + called, '<tool_call>\n{"name": "", "arguments": ' + json.dumps(payload))
    turn = http.post(f'{at}/turns', json={'messages': [{'role': 'user', 'content': payload}]}, headers=headers)
    http.post(f'{at}/turns/0/decision', json={'decision': 'approve'}, headers=headers)
    results = {'results': [{'call': 0, 'ok': False, 'text': payload}]}
    assert turn.is_success and http.post(f'{at}/turns/0/results', json=results, headers=headers).is_success
    assert http.post(f'{at}/turns', json={'messages': []}, headers=headers).json()['turn']['fault'] is not None
  page, elements = visitor.page, "document.querySelectorAll('*').length"
  page.evaluate(f'Object.assign(sessionStorage, {json.dumps(tokens)})')
  page.open(f'{browser.running.url}/console')
  page.evaluate('window.hits = 0; window.hit = () => { window.hits += 1; }')
  visitor.press('hostile', "document.querySelector('#adapter-name')?.textContent === 'hostile'")
  visitor.press('Session', f"document.querySelectorAll('#sessions button').length === {len(PAYLOADS)}")
  sizes = set()
  for number in range(len(PAYLOADS)):
    page.until("document.querySelector('#sessions button')")
    page.evaluate(f"document.querySelectorAll('#sessions button')[{number}].click()")
    page.until(visitor.shows(2))
    sizes.add(page.evaluate(elements))
    assert visitor.buttons() == ['Deny']
    visitor.press('All sessions', f"document.querySelectorAll('#sessions button').length === {len(PAYLOADS)}")
  assert len(sizes) == 1 and page.evaluate('window.hits') == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  'text, offered, why',
  [
    (session_world.called(session_world.GREP) + '<tool_call>\n{bad\n</tool_call>', ['Deny'], 'not valid JSON'),
    (session_world.called('{"name": "zz", "arguments": {}}'), ['Deny'], 'no tool zz'),
    (session_world.called(session_world.GREP, '{"name": "zz", "arguments": {}}'), ['Deny'], 'no tool zz'),
    (session_world.called('{"name": "r", "arguments": {"q": 1}}'), ['Edit', 'Deny'], 'needs the argument p'),
    (session_world.called('{"name": "r", "arguments": {"p": 1}}'), ['Edit', 'Deny'], 'does not take this argument p'),
    (session_world.called(session_world.READ), ['Approve', 'Edit', 'Deny'], ''),
  ],
)
def test_what_would_be_refused_is_not_offered(browser, visitor, text, offered, why):
  parameters = {'type': 'object', 'properties': {'p': {'type': 'string'}}, 'required': ['p']}
  browser.script.say(text)
  tools = [session_world.TOOLS[0], {'type': 'function', 'function': {'name': 'r', 'parameters': parameters}}]
  visitor.open_session(f'offered{abs(hash(text))}', tools)
  visitor.say()
  assert visitor.buttons() == offered
  assert why in visitor.read('#turns')


@pytest.mark.slow
def test_what_has_just_come_cannot_be_decided_on(browser, visitor):
  browser.script.say(session_world.called(session_world.READ))
  visitor.open_session('hasty')
  visitor.say()
  assert visitor.page.evaluate('window.seen') is True
  visitor.page.until("!document.querySelector('#turns .choices').inert")
  visitor.press('Versions', "!document.querySelector('#versions').hidden")
  visitor.press('Sessions', "document.querySelector('#turns .choices').inert")


@pytest.mark.slow
def test_a_narrow_screen_shows_all(browser, visitor):
  page = visitor.page
  page.size(420, 800)
  try:
    fits = 'document.documentElement.scrollWidth <= 420'
    browser.script.say('w' * 100, session_world.called(session_world.READ))
    assert page.evaluate(fits)
    visitor.open_session('narrow' * 10)
    visitor.say()
    visitor.say(2)
    assert page.evaluate(fits)
    visitor.press('Approve', "document.querySelector('.results')")
    assert page.evaluate(fits)
    visitor.press('Ask', 'true')
    assert page.evaluate(fits)
    root, http = '/v1/continual/adapters', browser.running.http
    http.post(f'{root}/{http.get(root).json()["adapters"][-1]["id"]}/undo', json={'to': 0})
    visitor.press('Versions', "document.querySelectorAll('#version-rows tr').length === 2")
    assert page.evaluate(fits)
  finally:
    page.call('Emulation.clearDeviceMetricsOverride')
