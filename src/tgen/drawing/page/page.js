'use strict';
/* The selection, and everything that follows it: thumbnails, matrix, cell, text, tables. */

const state = {
  index: Math.max(data.matrices.findIndex(({ selection }) => selection), 0),  /* index of the matrix */
  query: size - 1,
  key: 0,
  hovered: null,  /* the cell under the pointer, shown instead of the selected one */
  direction: 'from',  /* a token as a query; 'to': as a key */
};
const selectedMatrix = () => matrices[state.index];
const shownCell = () => state.hovered ?? { query: state.query, key: state.key };

/* Return the cell of a token with its largest weight, in the current direction. */
function largestCell(token) {
  const { query, key } = sortedWeights(selectedMatrix(), token, state.direction)[0];
  return { query, key };
}

function select(change) {
  Object.assign(state, { hovered: null }, change);
  render();
}

function hover(cell) {
  const same = (name) => cell?.[name] === state.hovered?.[name];
  if (same('query') && same('key')) return;
  state.hovered = cell;
  render();
}

/* Keyboard moves from the selected cell; a row ends at the diagonal. */
const MOVES = {
  ArrowUp: ({ query, key }) => [query - 1, key],
  ArrowDown: ({ query, key }) => [query + 1, key],
  ArrowLeft: ({ query, key }) => [query, key - 1],
  ArrowRight: ({ query, key }) => [query, key + 1],
  Home: ({ query }) => [query, 0],
  End: ({ query }) => [query, query],
  PageUp: ({ query, key }) => [query - 10, key],
  PageDown: ({ query, key }) => [query + 10, key],
};

function onMatrixKey(event) {
  const moves = event.shiftKey ? ARROWS : MOVES;
  if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (event.shiftKey) return thumbnails.move(...ARROWS[event.key]);
  const [row, column] = MOVES[event.key](state);
  const query = Math.min(Math.max(row, 0), size - 1);
  select({ query, key: Math.min(Math.max(column, firstKey(selectedMatrix(), query)), query) });
}

function addLegend() {
  const stops = colors.map((color) => `rgb(${color})`).join(', ');
  byId('ramp').style.background = `linear-gradient(to right, ${stops})`;
  for (const weight of [0, 0.02, 0.1, 0.25, 0.5, 1]) {
    const tick = make('span', {}, weight);
    tick.style.left = `${100 * Math.sqrt(weight)}%`;
    byId('ticks').append(tick);
  }
}

function showCell({ query, key }) {
  const { layer, head } = selectedMatrix();
  const weight = weightOf(selectedMatrix(), query, key);
  const masked = isMasked(selectedMatrix(), query, key);
  const output = byId('weight');
  const values = { layer, head: headName(head), query, key, weight, masked };
  for (const [name, value] of Object.entries(values)) output.dataset[name] = value;
  output.textContent = masked ? '—' : weightText(weight);
  const token = (i) => [make('b', { className: 'token' }, data.tokens[i].label), ` (${i})`];
  byId('cell-text').replaceChildren(
    'query ', ...token(query), masked ? ' cannot attend to key ' : ' attends to key ',
    ...token(key),
    key > query ? ': it comes later.' : masked ? ': it is before the sliding window.' : '.',
    make('span', { className: 'visually-hidden' },
      ` Attention weight ${masked ? 0 : weightText(weight)}, layer ${layer}, head ${headName(head)}.`));
}

const FIGURE_SPACE = '\u2007';  /* as wide as a digit: aligns decimal points */

/* List the largest weights of the token's row or column, and the sum of the others. */
function showTop(token) {
  const from = state.direction === 'from';
  const all = sortedWeights(selectedMatrix(), token, state.direction);
  const [top, rest] = [all.slice(0, 6), all.slice(6)];
  byId('title-top').replaceChildren(
    from ? 'Keys of query ' : 'Queries of key ',
    make('b', { className: 'token' }, data.tokens[token].label), ` (${token})`);
  const line = (weight, terms, ...name) => {
    const text = weightText(weight, terms).padEnd('0.00000'.length, FIGURE_SPACE);
    return barRow(weight, name, text);
  };
  const lines = top.map(({ weight, token: other }) =>
    line(weight, 1, make('small', {}, other), ' ', ...tokenText(data.tokens[other].label)));
  if (rest.length) {
    const sum = rest.reduce((total, one) => total + one.weight, 0);
    lines.push(line(sum, rest.length,
      rest.length === 1 ? '1 other' : `${rest.length} others, total`));
    lines.at(-1).className = 'rest';
  }
  byId('top').replaceChildren(...lines);
}

/* Shade the text by the weights of the selected token. */
function shadeText(token) {
  const from = state.direction === 'from';
  strip.forEach((chip, other) => {
    const [query, key] = from ? [token, other] : [other, token];
    chip.classList.toggle('masked', isMasked(selectedMatrix(), query, key));
    chip.classList.toggle('selected', other === token);
    chip.style.setProperty('--share', Math.sqrt(weightOf(selectedMatrix(), query, key)));
  });
  const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = strip[token];
  reveal(byId('strip'), offsetLeft, offsetTop, offsetWidth, offsetHeight);
}

function render() {
  const cell = shownCell();
  const token = state.direction === 'from' ? cell.query : cell.key;
  const { layer, head, kv_head: kvHead, window, selection } = selectedMatrix();
  const role = reportOf(selectedMatrix())?.role;
  byId('title-matrix').textContent =
    head === null ? `Layer ${layer}, mean of all heads` : `Layer ${layer}, head ${head}`;
  byId('about').textContent = [
    role && `role: ${role}`,
    kvHead !== null && kvHead !== head && `key/value head ${kvHead}`,
    window !== null && `sliding window: ${window} tokens`,
    selection,
  ].filter(Boolean).join(' · ');
  view.show(selectedMatrix(), cell, { follow: !state.hovered });
  showCell(cell);
  showTop(token);
  shadeText(token);
  const selected = state.direction === 'from' ? state.query : state.key;
  showNext(selected);
  strip.forEach((chip, i) => {
    chip.tabIndex = i === selected ? 0 : -1;
    chip.setAttribute('aria-pressed', i === selected);
  });
  thumbnails.mark(selectedMatrix());
  markHead(selectedMatrix());
}

byId('main').hidden = false;
addLegend();
const thumbnails = new Thumbnails(
  byId('thumbnails'), (matrix) => select({ index: matrices.indexOf(matrix) }));
thumbnails.show(matrices, colors, {
  factor: Math.ceil(size / 64), roleOf: (matrix) => reportOf(matrix)?.role,
});
const view = new MatrixView(byId('matrix'), { labels, colors, onHover: hover, onSelect: select });
const strip = tokenButtons(byId('strip'), labels, {
  onHover: (token) => hover(token === null ? null : largestCell(token)),
  onSelect: (token) => select(largestCell(token)),
});
const markHead =
  data.heads && byId('table') ? addHeadsTable((index) => select({ index })) : () => {};
const showNext = data.next ? addNextToken() : () => {};
if (byId('surprisal')) addSurprisal((token) => select(largestCell(token)));
if (byId('lens')) showLens(byId('lens'), data.lens, labels);
byId('matrix').addEventListener('keydown', onMatrixKey);
for (const input of document.getElementsByName('direction')) {
  input.addEventListener('change', () => {
    const token = state.direction === 'from' ? state.query : state.key;
    state.direction = input.value;
    select(largestCell(token));
  });
}
select(largestCell(size - 1));
