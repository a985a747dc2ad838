'use strict';
/* The next token of the selected position: sliders of samplers, and what they leave. */

const SHOWN_CANDIDATES = 12;

/* Build the sliders; return a function that shows a position. */
function addNextToken() {
  const { first, labels, positions, settings } = data.next;
  let shown = { position: null };

  addSliders(byId('sliders'), settings, Object.keys(labels).length, draw);

  function draw() {
    const { candidates, rest } = shown;
    const result = distribution(candidates, rest, settings);
    const order = ({ model, probability }) => -Math.max(model, probability);
    const rows = [...result.rows].sort((a, b) => order(a) - order(b)).slice(0, SHOWN_CANDIDATES);
    const bar = (share, className) => {
      const node = make('i', { className });
      node.style.setProperty('--share', share);
      return node;
    };
    byId('next').tBodies[0].replaceChildren(...rows.map((row) => make('tr', { 'data-id': row.id },
      make('th', { scope: 'row', className: 'words token' }, ...tokenText(labels[row.id])),
      make('td', { 'data-share': row.model }, percent(row.model)),
      make('td', { 'data-share': row.probability },
        row.removedBy ? `cut by ${optionName(row.removedBy)}` : percent(row.probability)),
      make('td', { className: 'shares', 'aria-hidden': 'true' },
        bar(row.model, 'model'), bar(row.probability, 'sampled')))));
    byId('next-steps').replaceChildren(...result.steps.map((step) => make('li', {},
      `${optionName(step.sampler)} ${settings[step.sampler]}: `,
      step.candidates
        ? `cuts ${step.candidates.toLocaleString('en')} tokens (probability ${percent(step.probability)}), `
          + `leaves ${step.left.toLocaleString('en')}`
        : 'cuts no token')));
  }

  return (position) => {
    if (position === shown.position) return;
    const record = positions[position - first];
    byId('next-panel').classList.toggle('missing', !record);
    byId('next-about').replaceChildren('After ',
      make('b', { className: 'token' }, data.tokens[position].label), ` (${position}). `,
      record ? 'Thin bars: the model’s own probability; thick bars: after the samplers.'
        : `The page has the logits of the positions from ${first} on.`);
    shown = { position, ...(record && readLogits(record)) };
    if (record) draw();
  };
}
