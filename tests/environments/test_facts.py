"""The task of facts in a document: what a document holds, and what counts as its answer."""

import pytest

from sdpo_jax.environments import facts, registry
from sdpo_jax.environments.registry import get, get_generator
from sdpo_jax.errors import UserError


def test_a_question_is_a_key_of_the_document_before_it():
  make = get_generator('facts')('test', 0)
  answers = set()
  for index in range(96):
    example = make(index)
    system, user = example.messages
    assert (system['role'], user['role']) == ('system', 'user')
    words = system['content'].split()
    assert len(words) == 192 and len(set(words[::4])) == len(set(words[1::4])) == 48 and set(words[3::4]) == {';'}
    at = words.index(user['content'])
    assert at % 4 == 0 and example.ground_truth == ' '.join(words[at + 1 : at + 4])
    answers.add((index // 48, user['content']))
    assert make(index).messages == example.messages
  assert len(answers) == 96  # All facts of a document, one after the other, and then those of another.
  assert make(0).messages[0] != make(48).messages[0] and make(0).messages[0] == make(47).messages[0]


def test_words_of_a_kind_are_words_of_no_other():
  words = [*facts.KEYS, *facts.FIRST, *facts.SECOND]
  assert (len(facts.KEYS), len(facts.FIRST), len(facts.SECOND), len(set(words))) == (64, 48, 48, 160)


def test_splits_and_seeds_have_other_documents():
  contents = [get_generator('facts')(split, seed)(0).messages[0] for split in ('train', 'test') for seed in (0, 1)]
  assert len({message['content'] for message in contents}) == 4
  short = get_generator('facts')('train', 0, facts='3')
  assert [len(short(index).messages[0]['content'].split()) for index in (0, 2, 3)] == [12, 12, 12]
  assert short(2).messages[0] == short(0).messages[0] != short(3).messages[0]


@pytest.mark.parametrize('options', [{'facts': '0'}, {'facts': '49'}, {'facts': 'many'}, {'facts': '-1'}])
def test_a_number_of_facts_that_is_none_is_refused(options):
  with pytest.raises(UserError, match='facts must be a number from 1 to 48'):
    get_generator('facts')('train', 0, **options)
  with pytest.raises(UserError, match="has the splits 'train' and 'test', not 'dev'"):
    get_generator('facts')('dev', 0)


def test_one_document_is_asked_about_in_both_splits_and_need_not_be_shown(tmp_path):
  text = 'bako meta sopi ; dige nari vela ;\n'
  (tmp_path / 'text.txt').write_text(text)
  file = str(tmp_path / 'text.txt')
  for split, seed in (('train', 0), ('test', 7)):
    made = get_generator('facts')(split, seed, document=file, shown='no')
    asked = [(made(index).messages, made(index).ground_truth) for index in range(3)]
    first, second = ([{'role': 'user', 'content': key}] for key in ('bako', 'dige'))
    assert asked == [(first, 'meta sopi ;'), (second, 'nari vela ;'), (first, 'meta sopi ;')]
  shown = get_generator('facts')('test', 0, document=file)(1)
  assert [message['content'] for message in shown.messages] == [text.strip(), 'dige']
  assert [message['role'] for message in get_generator('facts')('test', 0, shown='no')(0).messages] == ['user']


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'there is no fact'),
    ('bako meta sopi ; dige nari vela', "fact 2 is not a key, two values and ';', but 'dige nari vela'"),
    ('bako meta sopi ; dige nari ; vela', "fact 2 is not .* 'dige nari ; vela'"),
    ('bako meta ; ;', 'fact 1 is not'),
    ('bako meta sopi ; bako nari vela ;', 'a key occurs twice'),
  ],
)
def test_a_file_that_is_no_document_is_refused(tmp_path, text, message):
  (tmp_path / 'text.txt').write_text(text)
  with pytest.raises(UserError, match=f'text.txt: {message}'):
    get_generator('facts')('train', 0, document=str(tmp_path / 'text.txt'))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'shown': 'maybe'}, "shown must be 'yes' or 'no'"),
    ({'document': 'text.txt', 'facts': '3'}, 'has its own facts: leave out facts'),
    ({'document': 'not_there.txt'}, 'not_there.txt'),
  ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
  with pytest.raises(UserError, match=message):
    get_generator('facts')('train', 0, **options)


@pytest.mark.parametrize(
  ('completion', 'score', 'acc'),
  [
    ('meta sopi ;', 1, 1),
    (' meta sopi', 1, 1),
    ('meta sala ;', 0, 0.5),
    ('sopi meta ;', 0, 0),
    ('meta', 0, 0.5),
    ('', 0, 0),
    (';', 0, 0),
    ('meta sopi meta', 0, 0),
    ('meta sopi ; ;', 0, 0),
  ],
)
def test_both_values_and_nothing_else_score(completion, score, acc):
  example = get_generator('facts')('train', 0)(0)
  example = type(example)(**{**vars(example), 'ground_truth': 'meta sopi ;'})
  (outcome,) = get('facts')([example], [completion], truncated=[False])
  assert (outcome.score, outcome.metrics['acc']) == (score, acc)
  assert bool(outcome.feedback) != bool(score)
  assert not score or outcome.metrics['pred'] == 'meta sopi'


def test_the_task_is_found_by_name():
  assert 'facts' in registry.names()
