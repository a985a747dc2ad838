'use strict';
/* The table of heads, the text by surprisal, the logit lens. Each is there if its data are. */

const difference = (a, b) => (a === null || b === null ? null : a - b);
const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=[0.]*$)/u, '');  /* no -0.00 */
const two = (value) => fixed(value, 2);

/* A score in repeated random text, beside the control's; shaded and sorted by what it has more. */
const twice = (name, field, about) => ({
  name, about, share: true,
  of: (r) => difference(r[field], r[`${field}_control`]),
  said: (r) => `${two(r[field])}/${two(r[`${field}_control`])}`,
  uniform: (r) => r[field],
});

/* What is shown of a head, under the terminal's words; `share` shades the cell by a part of 1. */
const COLUMNS = [
  { name: 'head', of: (r) => r.layer * 1e6 + r.head,
    about: 'layer and head; a click shows it above' },
  { name: 'role', of: (r) => r.role, about: 'the plainest thing it does, if it does one clearly' },
  { name: 'cost', of: (r) => r.ablation, form: (v) => fixed(v, 4),
    about: 'nats a token that the text costs more without this head' },
  { name: 'keys', of: (r) => r.effective_keys, form: (v) => v.toFixed(1),
    about: 'effective keys: over how many tokens its attention is spread, exp(entropy)' },
  { name: 'back', of: (r) => r.distance, form: (v) => v.toFixed(1),
    about: 'how many tokens back it looks, mean' },
  { name: 'self', of: (r) => r.self, share: true, about: 'weight on the query itself' },
  { name: 'prev', of: (r) => r.previous, share: true, about: 'weight on the token before' },
  { name: 'first', of: (r) => r.first, share: true,
    about: 'weight on the text’s first token; here the first query counts too, which can see ' +
      'nothing else: so attention sinks are counted' },
  twice('dup', 'duplicate',
    'in random text that comes twice: weight on the token’s earlier copy / on the same place ' +
    'where nothing came twice'),
  twice('induction', 'induction',
    'there: weight on what followed the earlier copy / on the same place where nothing came ' +
    'twice'),
  { name: 'text', of: (r) => r.text_induction, share: true,
    about: 'in this text: weight on what followed the same token earlier, mean over the queries ' +
      'that have such a token' },
  { name: 'near>far', of: (r) => r.by_distance, spread: true,
    about: 'its weight on 0, 1, 2–3, 4–7, … tokens back; sorts as back does' },
];

/* What the table's numbers were taken of, and why a column is not there. */
function tableNotes(report) {
  const { n_rows: rows, block_length: length, seeds, repeat_gain: gain, loss, heads } = report;
  const more = gain < 0 ? 'more' : 'less';
  const others = report.same_tokens ? 'the same ones come in another order' : 'others come';
  return [
    `Means over ${rows} queries: the first sees only itself, and counts for “first” alone. ` +
      'A title sorts, a head opens above.',
    length > 0 && `dup, induction: in ${seeds} × ${length} random tokens that come twice / the ` +
      `control: the same places where ${others}; drawn from ${report.drawn_from}; shaded and ` +
      'sorted by the difference.' + (gain === null ? '' :
        ` The second time costs ${two(Math.abs(gain))} nats a token ${more} than the control.`),
    length > 0 ||
      'dup, induction are left out: the context or the vocabulary is too small for them.',
    heads.some((r) => r.text_induction !== null) || 'text is left out: no token came twice.',
    loss !== null && `cost: with all heads the text costs ${loss.toFixed(3)} nats a token.`,
  ].filter((note) => typeof note === 'string');
}

/* Builds the table; returns a function that marks the head that is shown. */
function headsTable(choose) {
  const { heads: reports, baseline } = data.heads;
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
  const uniform = columns.slice(2).map(({ of, form, spread, uniform: alike }) => {
    const value = spread ? null : (alike ?? of)(baseline) ?? null;
    return make('td', {}, value === null ? '' : (form ?? two)(value));
  });
  const named = { scope: 'row', colSpan: 2, title: 'attention to all tokens alike' };
  const foot = make('tr', {}, make('th', named, 'uniform'), ...uniform);
  byId('table').append(make('thead', {}, make('tr', {}, ...titles)), body, make('tfoot', {}, foot));
  byId('table-note').append(...tableNotes(data.heads).map((note) => make('p', {}, note)));
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
  const cells = columns.slice(1).map(({ name: column, of, form, said, share, spread }) => {
    const value = of(report);
    if (column === 'role') return make('td', { className: 'words' }, value);
    if (spread) return make('td', {}, spreadBars(value));
    const shown = value === null ? '–' : said?.(report) ?? (form ?? two)(value);
    const cell = make('td', { className: share ? 'share' : '' }, shown);
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
