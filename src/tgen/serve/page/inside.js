/* The logit lens of a position, and what made its most likely next token, or the one chosen. */

import { ask, newestOnly } from './api.js';

const signed = (x) => (x < 0 ? '−' : '+') + Math.abs(x).toFixed(3);

const COMPUTING = 'computing …';
const WHY = 'The parts sum to the logit, with the scales of the norms held constant; “without it” is ' +
  'the change of the logit when the model runs on the text without the token (the last 32).';

function setAbout(text) {
  byId('inside-about').textContent = text;
  byId('inside').setAttribute('aria-busy', text === COMPUTING);
}

function drawTable(table, heads, lines) {
  const cell = (value, i) => (i ? make('td', {}, value) : make('th', { scope: 'row' }, value));
  table.replaceChildren(
    make('thead', {}, make('tr', {}, ...heads.map((h) => make('th', { scope: 'col' }, h)))),
    make('tbody', {}, ...lines.map((line) => make('tr', {}, ...line.map(cell)))));
}

function drawWhy(why, labels) {
  byId('title-why').replaceChildren(
    'Why ', make('b', { className: 'token' }, why.target), `: logit ${why.logit.toFixed(3)}, `,
    `probability ${percent(why.probability)}`);
  const number = (x) => (x === null ? '–' : signed(x));
  drawTable(byId('why-tokens'), ['earlier token', 'through attention', 'logit without it'],
    why.tokens.map((one) => [
      `${one.index} ${labels[one.index]}`, number(one.attention), number(one.without)]));
  const sums = Object.entries(why.sums);
  if (sums.length) sums.unshift(['all tokens, through attention', why.all_tokens]);
  const parts = why.parts.map(({ name, logit }) => [name, signed(logit)]);
  drawTable(byId('why-parts'), ['sum of', 'logit'],
    sums.map(([name, logit]) => [name, signed(logit)]));
  drawTable(byId('why-heads'), ['largest parts', 'logit'], parts);
  const total = sums.reduce((sum, [, logit]) => sum + logit, 0);
  Object.assign(byId('why-parts').dataset, { total, logit: why.logit });
}

export class Inside {
  constructor() {
    this.load = newestOnly(this.fetch.bind(this), (error) => setAbout(error.message));
  }

  setModel(facts) {
    this.facts = facts;
  }

  clear() {
    this.load.stop();
    this.shown = '';
    setAbout('');
    for (const name of ['lens', 'title-why', 'why-tokens', 'why-parts', 'why-heads']) {
      byId(name).replaceChildren();
    }
  }

  /* Show the prediction after the token `query`, whose next token may be in the text already. */
  show(tokens, query) {
    const ids = tokens.slice(0, this.facts.context).map(({ id }) => id);
    if (query >= ids.length) query = ids.length - 1;
    const shown = JSON.stringify([ids, query]);
    if (query < 0 || shown === this.shown) return;
    this.shown = shown;
    this.load(ids, query, tokens[query + 1]?.id, tokens.map(({ label }) => label));
  }

  async fetch(signal, ids, query, target, labels) {
    setAbout(COMPUTING);
    const body = { model: this.facts.name, ids, query };
    const explained = target === undefined ? body : { ...body, target };
    // The parts take one pass. Large models take seconds for the passes without a token.
    drawWhy(await ask('tgen/why', { ...explained, left_out: 0 }, signal), labels);
    if (this.facts.residual_stream) {
      const lens = await ask('tgen/lens', body, signal);
      showLens(byId('lens'), lens, labels);
      const box = byId('lens').parentElement;
      box.scrollLeft = box.scrollWidth;
    } else {
      byId('lens').replaceChildren();
    }
    drawWhy(await ask('tgen/why', explained, signal), labels);
    setAbout(this.facts.residual_stream ? WHY :
      'The logit lens needs a residual stream, which a post-norm model does not have.');
  }
}
