/* Attention: small pictures of all heads, the matrix of one of them, and where a token looks. */

import { ask, newestOnly } from './api.js';

const LOOKS = 8;  /* keys in the list */
const MAX_FOLLOWED = 512;  /* tokens; larger matrices take too long between two frames */

export class Attend {
  /* `onSelect` receives the query that is clicked in the matrix. */
  constructor({ onSelect }) {
    this.onSelect = onSelect;
    this.layer = this.head = this.nLoading = 0;
    this.ids = [];
    const onError = (error) => {
      this.hasFailed = true;
      byId('attend-about').textContent = error.message;
    };
    this.loadHeads = newestOnly(this.fetchHeads.bind(this), onError);
    this.loadMatrix = newestOnly(this.fetchMatrix.bind(this), onError);
    this.thumbnails = new Thumbnails(byId('thumbnails'), ({ layer, head }) => this.pick(layer, head));
    byId('matrix').addEventListener('keydown', (event) => {
      const [step] = ARROWS[event.key] ?? [0];
      if (!step || !this.matrix) return;
      event.preventDefault();
      this.onSelect(Math.min(Math.max(this.query + step, 0), this.matrix.size - 1));
    });
  }

  setModel(facts) {
    this.facts = facts;
    this.colors = makeColors(facts.ramp);
    this.layer = facts.layers - 1;
    this.head = 0;
  }

  clear() {
    this.loadHeads.stop();
    this.loadMatrix.stop();
    this.ids = [];
    this.matrix = null;
    byId('attend-about').textContent = '';
    for (const name of ['thumbnails', 'title-looks', 'looks']) byId(name).replaceChildren();
    byId('matrix').hidden = true;
  }

  /* Show a text and one of its tokens; what is shown already is not computed again. */
  show(tokens, query, { isGrowing = false } = {}) {
    this.query = query;
    this.labels = tokens.map(({ label }) => label);
    const ids = tokens.slice(0, this.facts.context).map(({ id }) => id);
    if (ids.length === this.ids.length && ids.every((id, i) => id === this.ids[i])) {
      this.draw();
      return;
    }
    this.ids = ids;
    if (!isGrowing) {
      this.matrix = null;
      this.hasFailed = false;
      byId('attend-about').textContent = 'computing attention …';
    }
    this.nLoading += 1;
    Promise.all([this.loadHeads(), this.loadMatrix()]).then(() => { this.nLoading -= 1; });
  }

  /* Follow a text while it is written: each answer arrives before the next is asked for. */
  follow(tokens, query) {
    if (this.nLoading || this.hasFailed || tokens.length > MAX_FOLLOWED) return;
    this.show(tokens, query, { isGrowing: true });
  }

  pick(layer, head) {
    this.layer = layer;
    this.head = head;
    this.thumbnails.mark(this);
    this.loadMatrix();
  }

  async fetchHeads(signal) {
    const answer = await ask('tgen/heads', { model: this.facts.name, ids: this.ids }, signal);
    const matrices = answer.pictures.flatMap((row, layer) => row.map((picture, head) => (
      { layer, head, size: answer.side, window: null, values: unpack(picture) })));
    this.thumbnails.show(matrices, this.colors);
    this.thumbnails.mark(this);
  }

  async fetchMatrix(signal) {
    const { ids, layer, head } = this;
    const body = { model: this.facts.name, ids, layer, head };
    const answer = await ask('tgen/attention', body, signal);
    byId('attend-about').textContent = `Layer ${layer}, head ${head}`;
    const values = unpack(answer.weights);
    this.matrix = { size: ids.length, window: answer.window, values };
    this.draw();
  }

  draw() {
    if (!this.matrix) return;
    byId('matrix').hidden = false;
    const labels = this.labels.slice(0, this.matrix.size);
    const query = Math.min(this.query, this.matrix.size - 1);
    if (!this.view) {
      const onSelect = ({ query: row }) => this.onSelect(row);
      const options = { labels, colors: this.colors, onHover: () => {}, onSelect };
      this.view = new MatrixView(byId('matrix'), options);
    }
    const keys = sortedWeights(this.matrix, query, 'from').slice(0, LOOKS);
    this.view.colors = this.colors;
    if (this.matrix !== this.view.painted) this.view.relabel(labels);
    this.view.show(this.matrix, { query, key: keys[0].key }, { follow: true });
    byId('matrix').setAttribute('aria-label',
      `Attention weights of layer ${this.layer}, head ${this.head}`);
    byId('title-looks').replaceChildren(
      make('b', { className: 'token' }, labels[query]), ` (${query}) looks at`);
    byId('looks').replaceChildren(...keys.map(({ key, weight }) => barRow(
      weight, [make('small', {}, key), ' ', ...tokenText(labels[key])], percent(weight),
      { 'data-key': key, 'data-weight': weight })));
  }
}
