"""Requests as browsers send them for pages that are not the service's own."""

# What a browser sends for a page that is not the service's own.
FOREIGN = {
  'a script of another site': {'Origin': 'https://evil.example', 'Sec-Fetch-Site': 'cross-site'},
  'one that says only who it is': {'Origin': 'https://evil.example'},
  'a sandboxed frame': {'Origin': 'null', 'Sec-Fetch-Site': 'cross-site'},
  'a link, an image, a form': {'Sec-Fetch-Site': 'cross-site'},
  'another port of this machine': {'Sec-Fetch-Site': 'same-site'},
  'a script of another port': {'Origin': 'http://localhost:3000', 'Sec-Fetch-Site': 'same-site'},
  'a name that leads here': {'Host': 'evil.example', 'Origin': 'http://evil.example', 'Sec-Fetch-Site': 'same-origin'},
  'the same without a word of its origin': {'Host': 'evil.example'},
  'a name that begins like one of ours': {'Host': 'localhost.evil.example:80'},
}
