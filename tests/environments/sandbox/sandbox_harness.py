"""A harness for the tests of the sandbox: executes the payload's code and returns its variable `result`."""


def run(payload):
  namespace = {'__name__': '__main__'} | payload.get('given', {})
  exec(payload['code'], namespace)
  return namespace.get('result')
