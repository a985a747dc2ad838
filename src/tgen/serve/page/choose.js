/* The samplers: sliders, and the candidates for the next token that each of them cuts. */

import { ask } from './api.js';
import { distribution, readLogits } from './samplers.js';

const ROWS = 20;

export class Choose {
  setModel(facts) {
    this.facts = facts;
    this.settings = { ...facts.sampling };
    addSliders(byId('sliders'), this.settings, facts.vocabulary, () => this.draw());
  }

  clear() {
    this.wanted = this.asked = this.shown = null;
    byId('choose-about').textContent = byId('bars-rest').textContent = '';
    byId('bars').replaceChildren();
  }

  /* Return the values of all sliders. */
  sampling() {
    return { ...this.settings };
  }

  /* Show the candidates after token `index` of a branch. */
  show(branch, index) {
    const ids = branch.tokens.slice(0, index + 1).map(({ id }) => id);
    const counts = new Map();  /* penalties count generated tokens */
    for (const id of ids.slice(branch.nPrompt)) counts.set(id, (counts.get(id) ?? 0) + 1);
    this.wanted = {
      facts: this.facts, ids, counts, label: branch.tokens[index].label,
      names: new Map(branch.tokens.map((token) => [token.id, token])),
      following: branch.tokens[index + 1]?.id,
    };
    this.follow();
  }

  /* Show one position at a time, then the newest: a text may grow faster than answers come. */
  async follow() {
    if (this.isBusy) return;
    this.isBusy = true;
    while (this.wanted) {
      const wanted = this.asked = this.wanted;
      this.wanted = null;
      try {
        await this.fetch(wanted);
      } catch (error) {
        if (this.asked === wanted) byId('choose-about').textContent = error.message;
      }
    }
    this.isBusy = false;
  }

  async fetch(position) {
    const { facts, ids, names } = position;
    if (ids.length > facts.context) return;
    const answer = await ask('tgen/next', { model: facts.name, ids });
    if (this.asked !== position) return;
    for (const { id, label } of answer.likely) names.set(id, { label: facts.controls[id] ?? label });
    this.shown = { ...position, logits: readLogits(answer.logits) };
    this.draw();
  }

  draw() {
    if (!this.shown) return;
    const { ids, counts, names, label, following, logits: { candidates, rest } } = this.shown;
    const counted = candidates.map((one) => ({ ...one, count: counts.get(one.id) ?? 0 }));
    const { rows, steps } = distribution(counted, rest, this.settings);
    const known = rows.filter(({ id }) => names.has(id));
    known.sort((a, b) => Math.max(b.model, b.probability) - Math.max(a.model, a.probability));
    byId('choose-about').replaceChildren(
      'Candidates after ', make('b', { className: 'token' }, label),
      ': the bar is the probability that samplers leave; in parentheses, the model’s own.');
    byId('bars').replaceChildren(...known.slice(0, ROWS).map((one) => {
      const cut = one.probability === 0;
      const why = cut ? `cut by ${optionName(one.removedBy)}` : percent(one.probability);
      const name = tokenText(names.get(one.id).label);
      if (one.id === following) name.push(make('small', {}, ' ← in the text'));
      return barRow(one.probability, name, `${why} (${percent(one.model)})`,
        { className: cut ? 'cut' : '', 'data-id': one.id, 'data-final': one.probability });
    }));
    const parts = steps.filter(({ candidates: n }) => n).map(({ sampler, candidates: n, probability }) =>
      `${optionName(sampler)} cuts ${n.toLocaleString('en')} (${percent(probability)})`);
    byId('bars-rest').textContent = parts.join(' · ');
    Object.assign(byId('bars').dataset,
      { sampling: JSON.stringify(this.settings), position: ids.length });
  }
}
