"""Rows in the reference's own schema."""

RAW = {
  'idx': 743,
  'kind': 'mcq',
  'dataset': 'sciknoweval',
  'answer': 'B',
  'elo': 1500,
  'prompt': 'What is 2 + 2?\n\nA: 3\nB: 4',
  'description': 'What is 2 + 2? The solution will be evaluated in a mcq environment.',
  'tests': '-',
  'embedding': [],
  'system': '\nAnswer with a letter.\n',
}
CODE = {
  **RAW,
  'kind': 'code',
  'dataset': 'livecodebench',
  'prompt': 'Write def f(self, x) and (self)',
  'description': 'def f(self, x)',
  'tests': '{"inputs": []}',
  'system': None,
}
CALLS = [{'Action': 'find', 'Action_Input': '{"name": "x"}'}]
