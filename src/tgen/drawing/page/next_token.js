'use strict';
/* The next token of the selected position: sliders of samplers, and what they leave. */

const SHOWN_CANDIDATES = 12;
const TOP_K_STOPS = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200,
  300, 500, 1000, 2000, 5000];
const percent = (share) =>
  share && share < 0.0005 ? '< 0.1%' : `${(100 * share).toFixed(1)}%`;
const optionName = (name) => name.replace('_', '-');

/* Build the sliders; return a function that shows a position. */
function addNextToken() {
  const { first, labels, positions, settings } = data.next;
  const last = Object.keys(labels).length;
  const stops = [...new Set([...TOP_K_STOPS.filter((k) => k < last), settings.top_k])]
    .sort((a, b) => a - b);
  const sliders = [
    { name: 'temperature', min: 0, max: Math.max(2, settings.temperature), step: 0.01 },
    { name: 'top_k', min: 0, max: stops.length - 1, step: 1, stops },
    { name: 'top_p', min: 0.01, max: 1, step: 0.01 },
    { name: 'min_p', min: 0, max: Math.max(0.5, settings.min_p), step: 0.005 },
  ];
  let shown = { position: null };

  for (const { name, min, max, step, stops: values } of sliders) {
    const input = make('input', { type: 'range', id: name, min, max, step });
    const output = make('output', { htmlFor: name });
    const showValue = () => {
      const value = settings[name];
      const off = { top_k: 0, top_p: 1, min_p: 0 }[name];
      output.textContent = value === off ? 'off' : String(value);
      input.setAttribute('aria-valuetext', output.textContent);
    };
    input.value = values ? values.indexOf(settings[name]) : settings[name];
    input.addEventListener('input', () => {
      settings[name] = values ? values[Number(input.value)] : Number(input.value);
      showValue();
      draw();
    });
    showValue();
    byId('sliders').append(make('label', { htmlFor: name }, optionName(name)), input, output);
  }

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
      make('td', { className: 'bars', 'aria-hidden': 'true' },
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
