"""The page of the service: what is sent, and, in a browser, what comes of a correction, a session and an undo."""

import json
import pathlib
import re

import pytest
from starlette.testclient import TestClient

from benchmarks import chromium
from sdpo_jax.config import Config
from sdpo_jax.serving.web import console
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


class Visitor:
  """Somebody who looks at the page and presses its buttons."""

  def __init__(self, page):
    self._page = page

  def write(self, selector: str, text: str) -> None:
    self._page.evaluate(f'document.querySelector({selector!r}).value = {text!r}')

  def press(self, text: str, then: str) -> None:
    """Presses the last button with this text that is shown, and waits for what comes of it."""
    self._page.evaluate(
      f"""[...document.querySelectorAll('button')].filter(
        (button) => button.textContent.startsWith({text!r}) && button.offsetParent).at(-1).click()"""
    )
    self._page.until(f"document.querySelector('#error:not([hidden])') || ({then})")
    assert self._page.evaluate("document.querySelector('#error').hidden"), self.read('#error')

  def read(self, selector: str) -> str:
    return self._page.evaluate(f'document.querySelector({selector!r}).innerText')


@pytest.mark.slow
@pytest.mark.skipif(chromium.installed() is None, reason='there is no Chromium')
def test_a_visitor_corrects_denies_edits_and_goes_back(tmp_path):
  script_tag = '<img src=x onerror="document.title=1">\u202e'
  hostile = session_world.called('{"name": "g", "arguments": {"p": "\\u202e<b>\\u3164"}}')
  with (
    session_world.world(tmp_path, prompt_buckets=(192,)) as (service, script),
    openai_server.behind_port(service, service.config) as running,
    chromium.opened(chromium.installed()) as page,
  ):
    page.open(f'{running.url}/console')
    visitor = Visitor(page)
    assert f'curl {running.url}/v1/continual/adapters' in visitor.read('#welcome')
    visitor.press('Create a first adapter', "document.querySelector('#adapter-name').textContent === 'first'")
    assert page.evaluate("document.querySelector('#welcome').hidden && document.querySelector('#choose').hidden")
    page.open(f'{running.url}/console')
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
    visitor.press('Session', "!document.querySelector('#session').hidden")
    visitor.write('#tools', json.dumps(session_world.TOOLS))
    visitor.press('Open a session', "!document.querySelector('#say').hidden")
    visitor.write('#message', 'x')
    visitor.press('Send', "document.querySelectorAll('#turns li').length === 1")
    visitor.write('#turns input', 'Use r.')
    visitor.press('Deny', "document.querySelectorAll('#turns li').length === 2")
    assert 'version 1 became 2' in visitor.read('#turns li')
    visitor.press('Edit', "!document.querySelector('#turns li:last-child textarea').hidden")
    visitor.write('#turns li:last-child textarea', '{"p": "y"}')
    visitor.press('Edit', "document.querySelector('#turns li:last-child .status').textContent === 'edited'")
    visitor.write('#turns li:last-child form textarea', 'found')
    visitor.press('Continue', "document.querySelectorAll('#turns li').length === 3")
    assert '\\u{202e}<b>\\u{3164}' in visitor.read('#turns li:last-child pre') and '\u202e' not in visitor.read(
      '#turns'
    )
    visitor.press('Versions', "document.querySelectorAll('#version-rows tr').length === 4")
    visitor.press('Undo to this', "document.querySelectorAll('#version-rows tr').length === 5")
    assert 'undo to 0' in visitor.read('#version-rows tr')
    assert page.complaints() == []
    assert {address.split('/')[2] for address in page.requested()} == {running.url.split('/')[2]}
