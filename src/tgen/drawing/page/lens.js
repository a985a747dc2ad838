'use strict';
/* The logit lens: the most likely token by layer (rows) and position (columns), shaded by its
   probability, and the rank and probability of the answer. */

function showLens(table, lens, labels) {
  const className = (i) => (lens.first + i === lens.query ? 'query' : '');
  const titles = lens.top[0].map((_, i) => make('th', { scope: 'col', className: className(i) },
    make('small', {}, lens.first + i), make('span', {}, ...tokenText(labels[lens.first + i]))));
  const headers = ['layer', `rank of ${lens.answer}`, 'probability'];
  const rows = lens.layers.map((name, layer) => {
    const cells = lens.top[layer].map((label, i) => {
      const p = lens.top_probabilities[layer][i];
      const properties = { className: `cell ${className(i)}`, title: percent(p) };
      const cell = make('td', properties, ...tokenText(label));
      cell.style.setProperty('--share', p);
      return cell;
    });
    return make('tr', {}, make('th', { scope: 'row' }, name),
      make('td', {}, lens.answer_ranks[layer]),
      make('td', {}, percent(lens.answer_probabilities[layer])), ...cells);
  });
  table.replaceChildren(
    make('thead', {}, make('tr', {}, ...headers.map((name) => make('th', { scope: 'col' }, name)), ...titles)),
    make('tbody', {}, ...rows));
}
