/* The samplers: sliders, and the candidates for the next token that each of them cuts. */

import { ask, newestOnly } from './api.js';
import { distribution, readLogits } from './samplers.js';

const ROWS = 20;

export class Choose {
  constructor() {
    this.load = newestOnly(this.fetch.bind(this), (error) => {
      byId('choose-about').textContent = error.message;
    });
  }

  setModel(facts) {
    this.facts = facts;
    this.ids = [];
    this.logits = null;
    this.settings = { ...facts.sampling };
    addSliders(byId('sliders'), this.settings, facts.vocabulary, () => this.draw());
  }

  /* Return the values of all sliders. */
  sampling() {
    return { ...this.settings };
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
    this.logits = null;  /* those of another position */
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
    const counted = candidates.map((one) => ({ ...one, count: this.counts.get(one.id) ?? 0 }));
    const { rows, steps } = distribution(counted, rest, this.settings);
    const known = rows.filter(({ id }) => this.names.has(id));
    known.sort((a, b) => Math.max(b.model, b.probability) - Math.max(a.model, a.probability));
    byId('choose-about').replaceChildren(
      'Candidates after ', make('b', { className: 'token' }, this.label),
      ': the bar is the probability that samplers leave; in parentheses, the model’s own.');
    byId('bars').replaceChildren(...known.slice(0, ROWS).map((one) => {
      const cut = one.probability === 0;
      const why = cut ? `cut by ${optionName(one.removedBy)}` : percent(one.probability);
      const name = tokenText(this.names.get(one.id).label);
      if (one.id === this.following) name.push(make('small', {}, ' ← in the text'));
      return barRow(one.probability, name, `${why} (${percent(one.model)})`,
        { className: cut ? 'cut' : '', 'data-id': one.id, 'data-final': one.probability });
    }));
    const parts = steps.filter(({ candidates: n }) => n).map(({ sampler, candidates: n, probability }) =>
      `${optionName(sampler)} cuts ${n.toLocaleString('en')} (${percent(probability)})`);
    byId('bars-rest').textContent = parts.join(' · ');
    Object.assign(byId('bars').dataset,
      { sampling: JSON.stringify(this.settings), position: this.ids.length });
  }
}
