/* The samplers: sliders, and the candidates for the next token that each of them cuts. */

import { ask, newestOnly } from './api.js';
import { distribution, readLogits } from './samplers.js';
import { barRow, percent } from './text.js';

const SLIDERS = [
  { name: 'temperature', label: 'temperature', min: 0, max: 2, step: 0.05 },
  { name: 'top_k', label: 'top-k', min: 0, max: 200, step: 1, off: 0 },
  { name: 'top_p', label: 'top-p', min: 0.01, max: 1, step: 0.01, off: 1 },
  { name: 'min_p', label: 'min-p', min: 0, max: 1, step: 0.01, off: 0 },
  { name: 'repetition_penalty', label: 'repetition', min: 1, max: 2, step: 0.05, off: 1 },
];
const ROWS = 20;

export class Choose {
  constructor() {
    this.inputs = {};
    this.load = newestOnly(this.fetch.bind(this), (error) => {
      byId('choose-about').textContent = error.message;
    });
    for (const { name, label, min, max, step, off } of SLIDERS) {
      const input = make('input', { type: 'range', min, max, step, id: `slider-${name}` });
      const output = make('output', {});
      input.addEventListener('input', () => { this.write(name); this.draw(); });
      this.inputs[name] = { input, output, off };
      byId('samplers').append(make('label', {}, label, input, output));
    }
  }

  setModel(facts) {
    this.facts = facts;
    this.ids = [];
    this.logits = null;
    for (const [name, { input }] of Object.entries(this.inputs)) {
      const value = facts.sampling[name];
      input.max = Math.max(input.max, value);
      input.value = value;
      this.write(name);
    }
  }

  write(name) {
    const { input, output, off } = this.inputs[name];
    output.textContent = Number(input.value) === off ? 'off' : input.value;
  }

  /* Return the values of all sliders. */
  sampling() {
    return Object.fromEntries(
      Object.entries(this.inputs).map(([name, { input }]) => [name, Number(input.value)]));
  }

  /* Show the candidates after token `index` of a branch. */
  show(branch, index) {
    this.ids = branch.tokens.slice(0, index + 1).map(({ id }) => id);
    this.counts = new Map();  /* penalties count generated tokens */
    for (const id of this.ids.slice(branch.nPrompt)) {
      this.counts.set(id, (this.counts.get(id) ?? 0) + 1);
    }
    this.names = new Map(branch.tokens.map((token) => [token.id, token]));
    this.label = branch.tokens[index].label;
    this.following = branch.tokens[index + 1]?.id;
    this.load();
  }

  async fetch(signal) {
    if (!this.ids.length || this.ids.length > this.facts.context) return;
    const { ids, facts } = this;
    const answer = await ask('tgen/next', { model: facts.name, ids }, signal);
    this.logits = readLogits(answer.logits);
    for (const token of answer.likely) this.names.set(token.id, token);
    this.draw();
  }

  draw() {
    if (!this.logits) return;
    const { candidates, rest } = this.logits;
    const sampling = this.sampling();
    const counted = candidates.map((one) => ({ ...one, count: this.counts.get(one.id) ?? 0 }));
    const { rows, steps } = distribution(counted, rest, sampling);
    const known = rows.filter(({ id }) => this.names.has(id));
    known.sort((a, b) => Math.max(b.model, b.probability) - Math.max(a.model, a.probability));
    byId('choose-about').replaceChildren(
      'Candidates after ', make('b', { className: 'token' }, this.label),
      ': the bar is the probability that samplers leave; in parentheses, the model’s own.');
    byId('bars').replaceChildren(...known.slice(0, ROWS).map((one) => {
      const cut = one.probability === 0;
      const why = cut ? `cut by ${one.removedBy.replace('_', '-')}` : percent(one.probability);
      const name = tokenText(this.names.get(one.id).label);
      if (one.id === this.following) name.push(make('small', {}, ' ← in the text'));
      return barRow(one.probability, name, `${why} (${percent(one.model)})`,
        { className: cut ? 'cut' : '', 'data-id': one.id, 'data-final': one.probability });
    }));
    const parts = steps.filter(({ candidates: n }) => n).map(({ sampler, candidates: n, probability }) =>
      `${sampler.replace('_', '-')} cuts ${n.toLocaleString('en')} (${percent(probability)})`);
    byId('bars-rest').textContent = parts.join(' · ');
    Object.assign(byId('bars').dataset,
      { sampling: JSON.stringify(sampling), position: this.ids.length });
  }
}
