"""How the benchmark of the service finds the server that it has started."""

from benchmarks import serve


def test_the_address_is_read_when_it_is_there_whole():
  said = 'Listening on http://127.0.0.1:38099; /readyz says when it is ready, and /docs what can be asked.\n'
  assert serve.address_in(said) == 'http://127.0.0.1:38099'
  assert serve.address_in('Listening on http://[::1]:8420; …') == 'http://[::1]:8420'
  assert all(serve.address_in(said[:end]) is None for end in range(said.index(';') + 1))
