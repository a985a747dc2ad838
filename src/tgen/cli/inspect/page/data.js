'use strict';
/* What the page was given, and small things to build with. Tokens become text, never markup. */

const WHOLE = 65535;  /* a weight of 1 */
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId('data').textContent);
const size = data.tokens.length;

/* A head's lower triangle, row by row: 16 bits a weight, the low byte first. */
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

const place = (query, key) => (query * (query + 1)) / 2 + key;
const weightOf = (matrix, query, key) =>
  key > query ? 0 : matrix.values[place(query, key)] / WHOLE;

/* A weight, or the sum of so many, with the digits that its rounding to 65535ths left: four, and
   five where four would make small weights alike. What may be nothing is not said to be 0. */
function weightText(weight, summed = 1) {
  const off = summed / 2 / WHOLE;  /* at most */
  const known = Math.floor(-Math.log10(off));
  const text = weight.toFixed(Math.max(0, Math.min(weight < 0.001 ? 5 : 4, known)));
  return Number(text) > 0 ? text : `< ${(Math.ceil((weight + off) * 1e5) / 1e5).toFixed(5)}`;
}

/* The keys of a query, or the queries of a key, with their weights; the largest first. */
function ordered(matrix, token, direction) {
  const found = [];
  for (let other = 0; other < size; other++) {
    if (direction === 'from' ? other > token : other < token) continue;
    const [query, key] = direction === 'from' ? [token, other] : [other, token];
    found.push({ query, key, token: other, weight: weightOf(matrix, query, key) });
  }
  return found.sort((a, b) => b.weight - a.weight);
}

/* 256 colours from nothing to the whole; `shadeOf` says which one a weight has. */
const colours = Array.from({ length: 256 }, (_, shade) => {
  const at = (shade / 255) * (data.ramp.length - 1);
  const low = Math.min(Math.floor(at), data.ramp.length - 2);
  const next = data.ramp[low + 1];
  return data.ramp[low].map((part, i) => Math.round(part + (next[i] - part) * (at - low)));
});
const shadeOf = (weight) => Math.round(255 * Math.sqrt(weight));

/* Draws a triangle, one pixel for `factor` by `factor` weights: the largest of them. */
function paint(canvas, values, factor = 1) {
  const side = Math.ceil(size / factor);
  const pooled = new Uint16Array(side * side);
  for (let query = 0, i = 0; query < size; query++) {
    const row = Math.floor(query / factor) * side;
    for (let key = 0; key <= query; key++, i++) {
      const at = row + Math.floor(key / factor);
      if (values[i] > pooled[at]) pooled[at] = values[i];
    }
  }
  canvas.width = canvas.height = side;
  const image = new ImageData(side, side);
  for (let row = 0; row < side; row++) {
    for (let column = 0; column <= row; column++) {  /* what is right of the diagonal stays clear */
      const at = row * side + column;
      image.data.set([...colours[shadeOf(pooled[at] / WHOLE)], 255], at * 4);
    }
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
}

/* An element with properties and children; strings are text. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes('-') || name === 'role' || name === 'scope') node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/* Scrolls a box, and it alone, until a rectangle in it is in sight. */
function reveal(box, x, y, width, height) {
  const room = 6;
  const within = (at, low, high) => Math.max(Math.min(at, low - room), high + room);
  box.scrollLeft = within(box.scrollLeft, x, x + width - box.clientWidth);
  box.scrollTop = within(box.scrollTop, y, y + height - box.clientHeight);
}

/* A token's label; the dots and arrows that stand for white space are faint. */
function tokenText(label) {
  const [space] = /^[·⏎⇥]*/u.exec(label);
  const rest = label.slice(space.length);
  return space ? [make('span', { className: 'space' }, space), rest] : [rest];
}

/* The text as buttons, one Tab stop; `over` hears of the pointer, `choose` of clicks and arrows. */
function chips(box, { over, choose }) {
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
  box.addEventListener('pointerover', (event) => over(tokenAt(event)));
  box.addEventListener('pointerleave', () => over(null));
  box.addEventListener('click', (event) => tokenAt(event) !== null && choose(tokenAt(event)));
  box.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const ends = { Home: 0, End: size - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    const next = ends ?? Math.min(Math.max(tokenAt(event) + step, 0), size - 1);
    event.preventDefault();
    choose(next);
    buttons[next].focus();
  });
  return buttons;
}
