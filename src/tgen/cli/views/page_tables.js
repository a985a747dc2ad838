'use strict';
/* The table of heads, the text by surprisal, the logit lens. Each is there if its data are. */

const difference = (a, b) => (a === null || b === null ? null : a - b);
const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=[0.]*$)/u, '');  /* no -0.00 */
const two = (value) => fixed(value, 2);

/* What is shown of a head; `share` shades the cell by a part of 1. */
const COLUMNS = [
  { name: 'head', of: (r) => r.layer * 1e6 + r.head,
    about: 'layer and head; a click shows it above' },
  { name: 'role', of: (r) => r.role, about: 'the plainest thing it does, if it does one clearly' },
  { name: 'keys', of: (r) => r.effective_keys, form: (v) => v.toFixed(1),
    about: 'effective keys: over how many tokens its attention is spread, exp(entropy)' },
  { name: 'distance', of: (r) => r.distance, form: (v) => v.toFixed(1),
    about: 'how many tokens back it looks, mean' },
  { name: 'how far', of: (r) => r.by_distance, spread: true,
    about: 'its weight on 0, 1, 2–3, 4–7, … tokens back' },
  { name: 'self', of: (r) => r.self, share: true, about: 'weight on the query itself' },
  { name: 'previous', of: (r) => r.previous, share: true, about: 'weight on the token before' },
  { name: 'first', of: (r) => r.first, share: true, about: 'weight on the text’s first token' },
  { name: 'duplicate', of: (r) => difference(r.duplicate, r.duplicate_control), share: true,
    about: 'in repeated random text: weight on its earlier copy, less that without a repeat' },
  { name: 'induction', of: (r) => difference(r.induction, r.induction_control), share: true,
    about: 'there: weight on what followed the earlier copy, less that without a repeat' },
  { name: 'ablation', of: (r) => r.ablation, form: (v) => fixed(v, 4),
    about: 'nats a token that the text costs more without this head' },
];

/* Builds the table; returns a function that marks the head that is shown. */
function headsTable(choose) {
  const { heads: reports, baseline, n_rows: rows } = data.heads;
  const columns = COLUMNS.filter(({ of }) => reports.some((report) => of(report) !== null));
  const body = make('tbody');
  const lines = reports.map((report) => ({ report, row: headRow(report, columns, choose) }));
  const sorted = { name: 'head', down: false };

  function sort({ name, of, spread }) {
    sorted.down = name === sorted.name ? !sorted.down : !['head', 'role'].includes(name);
    sorted.name = name;
    const at = (line) => (spread ? line.report.distance : of(line.report));
    const sign = sorted.down ? -1 : 1;
    const compare = (a, b) => (typeof a === 'string' ? a.localeCompare(b) : a - b);
    lines.sort((a, b) => {
      const [x, y] = [at(a), at(b)];
      const missing = (v) => v === null || v === '';  /* last in either direction */
      return missing(x) - missing(y) || sign * compare(x, y);
    });
    body.append(...lines.map(({ row }) => row));
    titles.forEach((title, i) => {
      const order = sorted.down ? 'descending' : 'ascending';
      title.setAttribute('aria-sort', columns[i].name === name ? order : 'none');
    });
  }

  const titles = columns.map((column) => {
    const button = make('button', { type: 'button', title: column.about }, column.name);
    button.addEventListener('click', () => sort(column));
    return make('th', { scope: 'col', className: column.name === 'role' ? 'words' : '' }, button);
  });
  titles[0].setAttribute('aria-sort', 'ascending');
  body.append(...lines.map(({ row }) => row));
  const uniform = columns.slice(2).map(({ of, form, name }) => {
    const lessControl = ['duplicate', 'induction'].includes(name);
    const value = lessControl ? null : of({ by_distance: null, ...baseline }) ?? null;
    return make('td', {}, value === null ? '' : (form ?? two)(value));
  });
  const foot = make('tr', {},
    make('th', { scope: 'row', colSpan: 2 }, 'all tokens alike'), ...uniform);
  byId('table').append(make('thead', {}, make('tr', {}, ...titles)), body, make('tfoot', {}, foot));
  byId('table-note').textContent = `Means over ${rows} queries. A title sorts, a head opens above.`;
  byId('columns').append(...columns.flatMap(({ name, about }) =>
    [make('dt', {}, name), make('dd', {}, about)]));
  return (shown) => lines.forEach(({ report, row }) => {
    row.classList.toggle('shown', report.layer === shown.layer && report.head === shown.head);
  });
}

function headRow(report, columns, choose) {
  const index = indexOf(report.layer, report.head);
  const name = `${report.layer}.${report.head}`;
  const button = make('button', {
    type: 'button',
    disabled: index < 0,
    'aria-label': `Show layer ${report.layer}, head ${report.head}`,
  }, name);
  const cells = columns.slice(1).map(({ name: column, of, form, share, spread }) => {
    const value = of(report);
    if (column === 'role') return make('td', { className: 'words' }, value);
    if (spread) return make('td', {}, spreadBars(value));
    const said = value === null ? '–' : (form ?? two)(value);
    const cell = make('td', { className: share ? 'share' : '' }, said);
    if (share) cell.style.setProperty('--share', Math.min(Math.max(value ?? 0, 0), 1));
    return cell;
  });
  const row = make('tr', {}, make('th', { scope: 'row' }, button), ...cells);
  if (index >= 0) row.addEventListener('click', () => choose(index));
  return row;
}

function spreadBars(shares) {
  const bars = shares.map((share) => {
    const bar = make('i');
    bar.style.setProperty('--share', share);
    return bar;
  });
  const from = (i) => (i === 0 ? 0 : 2 ** (i - 1));
  const said = shares.map((share, i) => `from ${from(i)} back: ${two(share)}`).join(', ');
  const properties = { className: 'spread', role: 'img', 'aria-label': said, title: said };
  return make('span', properties, ...bars);
}

/* The text, shaded by bits: full where a token cost as much as a blind guess among all tokens. */
function surprisalStrip(choose) {
  const line = byId('surprise');
  const blind = Math.log2(data.vocabulary);
  let read = data.tokens.findIndex(({ surprisal }) => surprisal !== null);
  const tell = (i) => {
    const { label, surprisal, rank, likeliest, probability } = data.tokens[i];
    line.replaceChildren(`${i} `, make('b', { className: 'token' }, label));
    if (surprisal === null) line.append(' comes first: nothing foretells it.');
    else line.append(
      ` ${surprisal.toFixed(2)} bits, rank ${rank}. First choice `,
      make('b', { className: 'token' }, likeliest), ` with ${(100 * probability).toFixed(1)} %.`);
  };
  const buttons = chips(byId('surprisal'), {
    over: (i) => tell(i ?? read),
    choose: (i) => {
      buttons[read].tabIndex = -1;
      buttons[i].tabIndex = 0;
      read = i;
      tell(i);
      choose(i);
    },
  });
  buttons.forEach((button, i) => {
    const { surprisal, rank } = data.tokens[i];
    button.style.setProperty('--share', Math.min((surprisal ?? 0) / blind, 1));
    button.title = surprisal === null ? '' : `${surprisal.toFixed(2)} bits, rank ${rank}`;
    button.addEventListener('focus', () => tell(i));
  });
  buttons[read].tabIndex = 0;
  tell(read);
}

/* Layers down, positions across: the first choice after each, darker the surer. */
function lensTable() {
  const { layers: names, first, likeliest, probabilities, query, ranks } = data.lens;
  const chances = data.lens.answer_probabilities;
  const titles = likeliest[0].map((_, i) => {
    const { label } = data.tokens[first + i];
    const className = first + i === query ? 'query' : '';
    return make('th', { scope: 'col', className },
      make('small', {}, first + i), make('span', {}, ...tokenText(label)));
  });
  const named = ['after', 'rank', '%'].map((name) => make('th', { scope: 'col' }, name));
  const head = make('tr', {}, ...named, ...titles);
  const rows = names.map((name, layer) => {
    const cells = likeliest[layer].map((label, i) => {
      const p = probabilities[layer][i];
      const cell = make('td', {
        className: first + i === query ? 'cell query' : 'cell', title: `${(100 * p).toFixed(1)} %`,
      }, ...tokenText(label));
      cell.style.setProperty('--share', p);
      return cell;
    });
    return make('tr', {}, make('th', { scope: 'row' }, name), make('td', {}, ranks[layer]),
      make('td', {}, (100 * chances[layer]).toFixed(1)), ...cells);
  });
  byId('lens').append(make('thead', {}, head), make('tbody', {}, ...rows));
}
