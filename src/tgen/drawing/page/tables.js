'use strict';
/* The table of head metrics and the text by surprisal; each only if its data exists. */

const difference = (a, b) => (a === null || b === null ? null : a - b);
const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=[0.]*$)/u, '');  /* no -0.00 */
const twoDecimals = (value) => fixed(value, 2);

/* A score with its control; shaded and sorted by their difference. */
const controlled = (name) => ({
  name, share: true,
  value: (r) => difference(r[name], r[`${name}_control`]),
  text: (r) => `${twoDecimals(r[name])}/${twoDecimals(r[`${name}_control`])}`,
  uniform: (r) => r[name],
});

/* The columns of the terminal's table; `share` shades a cell by its value from 0 to 1. */
const COLUMNS = [
  { name: 'head', value: (r) => r.layer * 1e6 + r.head },
  { name: 'role', value: (r) => r.role },
  { name: 'Δloss', value: (r) => r.ablation_cost, format: (v) => fixed(v, 4) },
  { name: 'keys', value: (r) => r.effective_keys, format: (v) => v.toFixed(1) },
  { name: 'dist', value: (r) => r.distance, format: (v) => v.toFixed(1) },
  { name: 'self', value: (r) => r.self, share: true },
  { name: 'prev', value: (r) => r.previous, share: true },
  { name: 'first', value: (r) => r.first, share: true },
  controlled('duplicate'),
  controlled('induction'),
  { name: 'text', value: (r) => r.text_induction, share: true },
  { name: 'distances', value: (r) => r.distance_histogram, histogram: true },
];

/* Build the table; return a function that marks the row of the selected head. */
function addHeadsTable(onSelect) {
  const { heads: reports, baseline, window_baseline: windowBaseline } = data.heads;
  const columns = COLUMNS.filter(({ value }) => reports.some((report) => value(report) !== null));
  const body = make('tbody');
  const lines = reports.map((report) => ({ report, row: headRow(report, columns, onSelect) }));
  const order = { name: 'head', descending: false };

  function sort({ name, value, histogram }) {
    order.descending =
      name === order.name ? !order.descending : !['head', 'role'].includes(name);
    order.name = name;
    const sortKey = ({ report }) => (histogram ? report.distance : value(report));
    const sign = order.descending ? -1 : 1;
    const compare = (a, b) => (typeof a === 'string' ? a.localeCompare(b) : a - b);
    lines.sort((a, b) => {
      const [x, y] = [sortKey(a), sortKey(b)];
      const missing = (v) => v === null || v === '';  /* last in either direction */
      return missing(x) - missing(y) || sign * compare(x, y);
    });
    body.append(...lines.map(({ row }) => row));
    titles.forEach((title, i) => {
      const direction = order.descending ? 'descending' : 'ascending';
      title.setAttribute('aria-sort', columns[i].name === name ? direction : 'none');
    });
  }

  const titles = columns.map((column) => {
    const button = make('button', { type: 'button', title: data.meanings[column.name] }, column.name);
    button.addEventListener('click', () => sort(column));
    return make('th', { scope: 'col', className: column.name === 'role' ? 'words' : '' }, button);
  });
  titles[0].setAttribute('aria-sort', 'ascending');
  body.append(...lines.map(({ row }) => row));
  const uniformRow = (name, metrics) => {
    const cells = columns.slice(2).map(({ value, format, histogram, uniform }) => {
      const number = histogram ? null : (uniform ?? value)(metrics) ?? null;
      return make('td', {}, number === null ? '' : (format ?? twoDecimals)(number));
    });
    const properties = { scope: 'row', colSpan: 2, title: 'uniform attention' };
    return make('tr', {}, make('th', properties, name), ...cells);
  };
  const foot = [uniformRow('uniform', baseline)];
  if (windowBaseline) foot.push(uniformRow('uniform, window', windowBaseline));
  byId('table').append(
    make('thead', {}, make('tr', {}, ...titles)), body, make('tfoot', {}, ...foot));
  byId('table-note').append(...data.heads.notes.map((note) => make('p', {}, note)));
  byId('columns').append(...columns.flatMap(({ name }) =>
    [make('dt', {}, name), make('dd', {}, data.meanings[name])]));
  return ({ layer, head }) => lines.forEach(({ report, row }) => {
    row.classList.toggle('selected', report.layer === layer && report.head === head);
  });
}

function headRow(report, columns, onSelect) {
  const index = indexOf(report.layer, report.head);
  const button = make('button', {
    type: 'button',
    disabled: index < 0,
    'aria-label': `Show layer ${report.layer}, head ${report.head}`,
  }, `${report.layer}.${report.head}`);
  const cells = columns.slice(1).map((column) => {
    const value = column.value(report);
    if (column.name === 'role') return make('td', { className: 'words' }, value);
    if (column.histogram) return make('td', {}, histogramBars(value));
    const text =
      value === null ? '–' : column.text?.(report) ?? (column.format ?? twoDecimals)(value);
    const cell = make('td', { className: column.share ? 'share' : '' }, text);
    if (column.share) cell.style.setProperty('--share', Math.min(Math.max(value ?? 0, 0), 1));
    return cell;
  });
  const row = make('tr', {}, make('th', { scope: 'row' }, button), ...cells);
  if (index >= 0) row.addEventListener('click', () => onSelect(index));
  return row;
}

function histogramBars(shares) {
  const bars = shares.map((share) => {
    const bar = make('i');
    bar.style.setProperty('--share', share);
    return bar;
  });
  const start = (i) => (i === 0 ? 0 : 2 ** (i - 1));
  const label = shares.map((share, i) => `from ${start(i)} tokens back: ${twoDecimals(share)}`).join(', ');
  const properties = { className: 'histogram', role: 'img', 'aria-label': label, title: label };
  return make('span', properties, ...bars);
}

/* Shade the text by surprisal; full color: the bits of a uniform guess among all tokens. */
function addSurprisal(onSelect) {
  const line = byId('surprisal-text');
  const uniformBits = Math.log2(data.vocabulary);
  let selected = data.tokens.findIndex(({ surprisal }) => surprisal !== null);
  const show = (i) => {
    const { label, surprisal, rank, top, top_probability: probability } = data.tokens[i];
    line.replaceChildren(`${i} `, make('b', { className: 'token' }, label));
    if (surprisal === null) line.append(': first token, not predicted.');
    else line.append(
      `: ${surprisal.toFixed(2)} bits, rank ${rank}. Most likely: `,
      make('b', { className: 'token' }, top), ` (${percent(probability)}).`);
  };
  const buttons = tokenButtons(byId('surprisal'), labels, {
    onHover: (i) => show(i ?? selected),
    onSelect: (i) => {
      buttons[selected].tabIndex = -1;
      buttons[i].tabIndex = 0;
      selected = i;
      show(i);
      onSelect(i);
    },
  });
  buttons.forEach((button, i) => {
    const { surprisal, rank } = data.tokens[i];
    button.style.setProperty('--share', Math.min((surprisal ?? 0) / uniformBits, 1));
    button.title = surprisal === null ? '' : `${surprisal.toFixed(2)} bits, rank ${rank}`;
    button.addEventListener('focus', () => show(i));
  });
  buttons[selected].tabIndex = 0;
  show(selected);
}
