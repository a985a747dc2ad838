'use strict';
/* The page's data, and DOM helpers. Tokens are inserted as text, never as markup. */

const SCALE = 65535;  /* stands for a weight of 1 */
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId('data').textContent);
const size = data.tokens.length;

/* Decode a head's lower triangle, row by row: 16 bits per weight, little-endian. */
function unpack(id) {
  const bytes = atob(byId(id).textContent.trim());
  const values = new Uint16Array(bytes.length / 2);
  for (let i = 0; i < values.length; i++) {
    values[i] = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
  }
  return values;
}

const matrices = data.matrices.map((matrix) => ({ ...matrix, values: unpack(matrix.id) }));
const layers = [...new Set(matrices.map((matrix) => matrix.layer))].sort((a, b) => a - b);
const heads = [...new Set(matrices.map((matrix) => matrix.head))].sort((a, b) => a - b);
const headName = (head) => (head === null ? 'mean' : String(head));
const indexOf = (layer, head) =>
  matrices.findIndex((matrix) => matrix.layer === layer && matrix.head === head);
const reportOf = ({ layer, head }) =>
  data.heads?.heads.find((report) => report.layer === layer && report.head === head);

const triangleIndex = (query, key) => (query * (query + 1)) / 2 + key;
const firstKey = ({ window }, query) => (window === null ? 0 : Math.max(query - window + 1, 0));
const isMasked = (matrix, query, key) => key > query || key < firstKey(matrix, query);
const weightOf = (matrix, query, key) =>
  key > query ? 0 : matrix.values[triangleIndex(query, key)] / SCALE;

/* Format a weight, or a sum of `terms` weights, with the digits that are exact despite rounding:
   4, or 5 for small weights. A weight rounded to 0 becomes "< bound". */
function weightText(weight, terms = 1) {
  const maxError = terms / 2 / SCALE;
  const digits = Math.floor(-Math.log10(maxError));
  const text = weight.toFixed(Math.max(0, Math.min(weight < 0.001 ? 5 : 4, digits)));
  return Number(text) > 0 ? text : `< ${(Math.ceil((weight + maxError) * 1e5) / 1e5).toFixed(5)}`;
}

/* Return the visible keys of a query ('from'), or queries of a key ('to'), largest weight first. */
function sortedWeights(matrix, token, direction) {
  const cells = [];
  for (let other = 0; other < size; other++) {
    const [query, key] = direction === 'from' ? [token, other] : [other, token];
    if (isMasked(matrix, query, key)) continue;
    cells.push({ query, key, token: other, weight: weightOf(matrix, query, key) });
  }
  return cells.sort((a, b) => b.weight - a.weight);
}

/* 256 colors for weights from 0 to 1; `shadeOf` returns a weight's index. */
const colors = Array.from({ length: 256 }, (_, shade) => {
  const position = (shade / 255) * (data.ramp.length - 1);
  const low = Math.min(Math.floor(position), data.ramp.length - 2);
  const next = data.ramp[low + 1];
  return data.ramp[low].map((part, i) => Math.round(part + (next[i] - part) * (position - low)));
});
const shadeOf = (weight) => Math.round(255 * Math.sqrt(weight));

/* Paint a matrix with one pixel per `factor` by `factor` weights: the maximum of the visible. */
function paint(canvas, matrix, factor = 1) {
  const { values } = matrix;
  const side = Math.ceil(size / factor);
  const pooled = new Int32Array(side * side).fill(-1);
  for (let query = 0, i = 0; query < size; query++) {
    const row = Math.floor(query / factor) * side;
    for (let key = 0; key <= query; key++, i++) {
      const pixel = row + Math.floor(key / factor);
      if (values[i] > pooled[pixel] && !isMasked(matrix, query, key)) pooled[pixel] = values[i];
    }
  }
  canvas.width = canvas.height = side;
  const image = new ImageData(side, side);
  pooled.forEach((value, pixel) => {  /* masked cells stay transparent */
    if (value >= 0) image.data.set([...colors[shadeOf(value / SCALE)], 255], pixel * 4);
  });
  canvas.getContext('2d').putImageData(image, 0, 0);
}

/* Create an element with properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes('-') || name === 'role' || name === 'scope') node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/* Scroll only `box`, until a rectangle in it is visible. */
function reveal(box, x, y, width, height) {
  const margin = 6;
  const clamp = (offset, low, high) => Math.max(Math.min(offset, low - margin), high + margin);
  box.scrollLeft = clamp(box.scrollLeft, x, x + width - box.clientWidth);
  box.scrollTop = clamp(box.scrollTop, y, y + height - box.clientHeight);
}

/* Return a token's label as nodes; the marks for leading whitespace are dimmed. */
function tokenText(label) {
  const [space] = /^[·⏎⇥]*/u.exec(label);
  const rest = label.slice(space.length);
  return space ? [make('span', { className: 'space' }, space), rest] : [rest];
}

/* Add one button per token, with one Tab stop; `onHover` receives the token under the pointer or
   null, `onSelect` the token clicked or reached by keyboard. */
function tokenButtons(box, { onHover, onSelect }) {
  const buttons = data.tokens.map(({ label }, i) => {
    const properties = { type: 'button', className: 'chip', tabIndex: -1, 'data-token': i };
    return make('button', properties, ...tokenText(label));
  });
  buttons.forEach((button, i) => {
    box.append(button);
    if (data.tokens[i].label.endsWith('⏎')) box.append(make('br'));
  });
  const tokenAt = (event) => {
    const button = event.target.closest('button');
    return button ? Number(button.dataset.token) : null;
  };
  box.addEventListener('pointerover', (event) => onHover(tokenAt(event)));
  box.addEventListener('pointerleave', () => onHover(null));
  box.addEventListener('click', (event) => tokenAt(event) !== null && onSelect(tokenAt(event)));
  box.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const ends = { Home: 0, End: size - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    const next = ends ?? Math.min(Math.max(tokenAt(event) + step, 0), size - 1);
    event.preventDefault();
    onSelect(next);
    buttons[next].focus();
  });
  return buttons;
}
