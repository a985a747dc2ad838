'use strict';
/* What is selected, and everything that follows it: thumbnails, matrix, reading, text, tables. */

const state = {
  index: Math.max(data.matrices.findIndex(({ why }) => why), 0),  /* of the matrix */
  query: size - 1,
  key: 0,
  pointed: null,  /* the cell under the pointer, read while it is there */
  direction: 'from',  /* 'to': who looks at the token, rather than what it looks at */
};
const shown = () => matrices[state.index];
const cell = () => state.pointed ?? { query: state.query, key: state.key };

/* A token of the text, with the one that it looks at, or is looked at by, most. */
function cellOf(token) {
  const { query, key } = ordered(shown(), token, state.direction)[0];
  return { query, key };
}

function select(change) {
  Object.assign(state, { pointed: null }, change);
  render();
}

function point(pointed) {
  const same = (name) => pointed?.[name] === state.pointed?.[name];
  if (same('query') && same('key')) return;
  state.pointed = pointed;
  render();
}

/* The next head that is in the page in a direction. */
function moveHead(down, across) {
  let row = layers.indexOf(shown().layer);
  let column = heads.indexOf(shown().head);
  do {
    row += down;
    column += across;
    if (!(row in layers) || !(column in heads)) return;
  } while (indexOf(layers[row], heads[column]) < 0);
  select({ index: indexOf(layers[row], heads[column]) });
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/* Where a key of the keyboard leads from the selected cell; a row ends where it sees no further. */
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
  const known = event.shiftKey ? ARROWS : MOVES;
  if (!(event.key in known) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (event.shiftKey) return moveHead(...ARROWS[event.key]);
  const [down, across] = MOVES[event.key](state);
  const query = Math.min(Math.max(down, 0), size - 1);
  select({ query, key: Math.min(Math.max(across, 0), query) });
}

/* A button a head; those that the page lacks leave a gap. */
function thumbnails() {
  const box = byId('thumbnails');
  const factor = Math.ceil(size / 64);
  box.style.setProperty('--heads', heads.length);
  box.append(make('span'), ...heads.map((head) => make('span', {}, headName(head))));
  const buttons = new Map();
  for (const layer of layers) {
    box.append(make('span', {}, layer));
    for (const head of heads) {
      const index = indexOf(layer, head);
      if (index < 0) {
        box.append(make('span'));
        continue;
      }
      const canvas = make('canvas');
      paint(canvas, matrices[index].values, factor);
      const role = reportOf(matrices[index])?.role;
      const name = `Layer ${layer}, head ${headName(head)}${role ? `: ${role}` : ''}`;
      const button = make('button', {
        type: 'button', title: name, 'aria-label': name,
        'data-layer': layer, 'data-head': headName(head),
      }, canvas);
      button.addEventListener('click', () => select({ index }));
      buttons.set(index, button);
      box.append(button);
    }
  }
  box.addEventListener('keydown', (event) => {
    if (!(event.key in ARROWS)) return;
    event.preventDefault();
    moveHead(...ARROWS[event.key]);
    buttons.get(state.index).focus();
  });
  return buttons;
}

function legend() {
  const stops = colours.map((colour) => `rgb(${colour})`).join(', ');
  byId('ramp').style.background = `linear-gradient(to right, ${stops})`;
  for (const weight of [0, 0.02, 0.1, 0.25, 0.5, 1]) {
    const tick = make('span', {}, weight);
    tick.style.left = `${100 * Math.sqrt(weight)}%`;
    byId('ticks').append(tick);
  }
}

function readCell({ query, key }) {
  const { layer, head } = shown();
  const weight = weightOf(shown(), query, key);
  const masked = key > query;
  const output = byId('weight');
  const named = { layer, head: headName(head), query, key, weight, masked };
  for (const [name, value] of Object.entries(named)) output.dataset[name] = value;
  output.textContent = masked ? '—' : weightText(weight);
  const token = (i) => [make('b', { className: 'token' }, data.tokens[i].label), ` (${i})`];
  byId('reading').replaceChildren(
    ...token(query), masked ? ' cannot see ' : ' looks at ', ...token(key),
    masked ? ', which comes later.' : '.',
    make('span', { className: 'unseen' },
      ` Weight ${masked ? 0 : weightText(weight)}, layer ${layer}, head ${headName(head)}.`));
}

const FIGURE_SPACE = '\u2007';  /* as wide as a digit: points stand below each other */

/* The largest weights of the token's row or column, and all others in one line. */
function readTop(token) {
  const from = state.direction === 'from';
  const all = ordered(shown(), token, state.direction);
  const [top, rest] = [all.slice(0, 6), all.slice(6)];
  byId('title-top').replaceChildren(
    from ? 'What ' : 'Who looks at ', make('b', { className: 'token' }, data.tokens[token].label),
    ` (${token})`, from ? ' looks at' : '');
  const line = (weight, summed, ...name) => {
    const said = weightText(weight, summed).padEnd('0.00000'.length, FIGURE_SPACE);
    const item = make('li', {},
      make('span', { className: 'name' }, ...name), make('span', { className: 'value' }, said));
    item.style.setProperty('--share', Math.min(weight, 1));
    return item;
  };
  const lines = top.map(({ weight, token: other }) =>
    line(weight, 1, make('small', {}, other), ' ', ...tokenText(data.tokens[other].label)));
  if (rest.length) {
    const sum = rest.reduce((total, one) => total + one.weight, 0);
    lines.push(line(sum, rest.length,
      rest.length === 1 ? '1 other' : `${rest.length} others, together`));
    lines.at(-1).className = 'rest';
  }
  byId('top').replaceChildren(...lines);
}

/* The text, shaded by the weights of the token that is read. */
function shadeText(token) {
  const from = state.direction === 'from';
  strip.forEach((chip, other) => {
    const [query, key] = from ? [token, other] : [other, token];
    chip.classList.toggle('hidden', key > query);
    chip.classList.toggle('read', other === token);
    chip.style.setProperty('--share', Math.sqrt(weightOf(shown(), query, key)));
  });
  const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = strip[token];
  reveal(byId('strip'), offsetLeft, offsetTop, offsetWidth, offsetHeight);
}

function render() {
  const at = cell();
  const token = state.direction === 'from' ? at.query : at.key;
  const { layer, head, kv_head: kvHead, why } = shown();
  const role = reportOf(shown())?.role;
  byId('title-matrix').textContent =
    head === null ? `Layer ${layer}, mean of its heads` : `Layer ${layer}, head ${head}`;
  byId('about').textContent = [
    role && `does: ${role}`,
    kvHead !== null && kvHead !== head && `keys and values of group ${kvHead}`,
    why,
  ].filter(Boolean).join(' · ');
  view.show(shown(), at, { follow: !state.pointed });
  readCell(at);
  readTop(token);
  shadeText(token);
  const selected = state.direction === 'from' ? state.query : state.key;
  strip.forEach((chip, i) => {
    chip.tabIndex = i === selected ? 0 : -1;
    chip.setAttribute('aria-pressed', i === selected);
  });
  for (const [index, button] of buttons) {
    button.setAttribute('aria-pressed', index === state.index);
    button.tabIndex = index === state.index ? 0 : -1;
  }
  markHead(shown());
}

byId('main').hidden = false;
legend();
const buttons = thumbnails();
const view = new MatrixView(byId('matrix'), { point, choose: select });
const strip = chips(byId('strip'), {
  over: (token) => point(token === null ? null : cellOf(token)),
  choose: (token) => select(cellOf(token)),
});
const markHead = data.heads && byId('table') ? headsTable((index) => select({ index })) : () => {};
if (byId('surprisal')) surprisalStrip((token) => select(cellOf(token)));
if (byId('lens')) lensTable();
byId('matrix').addEventListener('keydown', onMatrixKey);
for (const input of document.getElementsByName('direction')) {
  input.addEventListener('change', () => {
    const token = state.direction === 'from' ? state.query : state.key;
    state.direction = input.value;
    select(cellOf(token));
  });
}
select(cellOf(size - 1));
