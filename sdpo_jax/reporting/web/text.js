// Elements and texts. Text from a model or a user becomes a text node and is never parsed as HTML.

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'class') element.className = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Replaces the content of an element; null, undefined and false are skipped.
function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Nodes for a text in which invisible characters, and those that reorder others, are named (sdpo_jax/invisible.py).
function seen(text) {
  const nodes = [];
  let start = 0;
  for (const match of text.matchAll(INVISIBLE)) {
    if (match.index > start) nodes.push(text.slice(start, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, '0');
    nodes.push(make('span', { class: 'unseen', title: 'The character U+' + code }, 'U+' + code));
    start = match.index + match[0].length;
  }
  if (start < text.length) nodes.push(text.slice(start));
  return nodes;
}

// A text on one line, cut to a number of characters.
function short(text, most) {
  const line = text.replace(/\s+/g, ' ').trim();
  return line.length > most ? line.slice(0, most - 1) + '…' : line;
}

function counted(count, noun) {
  return count.toLocaleString('en-US') + ' ' + noun + (count === 1 ? '' : 's');
}

const SHARE = /(_rate|_fraction|@\d+|coverage|_mass|top1_in_support|mfu|fill_[a-z_]+|score_mean|acc_mean)$/;

function isShare(name, values) {
  return SHARE.test(name) && !/learning_rate$/.test(name) && values.every((value) => value >= 0 && value <= 1);
}

// Formats a number for people.
function number(value, share) {
  if (value === null || value === undefined || !isFinite(value)) return '–';
  if (share) return (100 * value).toFixed(value === 0 || value === 1 || Math.abs(value) < 0.995 && Math.abs(value) >= 0.0995 ? 0 : 1) + '%';
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1e6) return (value / 1e6).toFixed(1) + 'M';
  if (size >= 1e4) return Math.round(value).toLocaleString('en-US');
  if (size === 0) return '0';
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(size < 1 ? 3 : 4)));
}
