// Data of the page: compressed, in base 64, unpacked on demand.

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function unpacked(id) {
  const bytes = bytesOf(document.getElementById(id).textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return JSON.parse(await new Response(stream).text());
}

const PIECES_KEPT = 12;
const pieces = new Map(); // Number of a piece → promise of its rollouts; the most recently used one is last.

function rolloutsOf(piece) {
  const found = pieces.get(piece) || unpacked('piece' + piece);
  pieces.delete(piece);
  pieces.set(piece, found);
  if (pieces.size > PIECES_KEPT) pieces.delete(pieces.keys().next().value);
  return found;
}
