/* Attention: small pictures of all heads, the matrix of one of them, and where a token looks. */

import { ask, fromBase64, newestOnly } from './api.js';

const LOOKS = 8;  /* keys in the list */
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class Attend {
  /* `onSelect` receives the query that is clicked in the matrix. */
  constructor({ onSelect }) {
    this.onSelect = onSelect;
    this.layer = this.head = 0;
    this.ids = [];
    const onError = (error) => { byId('attend-about').textContent = error.message; };
    this.loadHeads = newestOnly(this.fetchHeads.bind(this), onError);
    this.loadMatrix = newestOnly(this.fetchMatrix.bind(this), onError);
    byId('thumbnails').addEventListener('keydown', (event) => {
      if (!(event.key in ARROWS)) return;
      event.preventDefault();
      const [down, right] = ARROWS[event.key];
      const { layers, heads } = this.facts;
      this.pick((this.layer + down + layers) % layers, (this.head + right + heads) % heads);
      this.button(this.layer, this.head).focus();
    });
  }

  setModel(facts) {
    this.facts = facts;
    this.colors = makeColors(facts.ramp);
    this.layer = facts.layers - 1;
    this.head = 0;
    this.ids = [];
    byId('thumbnails').replaceChildren();
  }

  /* Show a text and one of its tokens; what is shown already is not computed again. */
  show(tokens, query) {
    this.query = query;
    if (!tokens.length) return;
    this.labels = tokens.map(({ label }) => label);
    const ids = tokens.slice(0, this.facts.context).map(({ id }) => id);
    if (ids.length === this.ids.length && ids.every((id, i) => id === this.ids[i])) {
      this.draw();
      return;
    }
    this.ids = ids;
    this.matrix = null;
    byId('attend-about').textContent = 'computing attention …';
    this.loadHeads();
    this.loadMatrix();
  }

  pick(layer, head) {
    this.layer = layer;
    this.head = head;
    this.mark();
    this.loadMatrix();
  }

  button(layer, head) {
    return byId('thumbnails').querySelector(`[data-layer="${layer}"][data-head="${head}"]`);
  }

  mark() {
    for (const button of byId('thumbnails').querySelectorAll('button')) {
      const { layer, head } = button.dataset;
      const pressed = Number(layer) === this.layer && Number(head) === this.head;
      button.setAttribute('aria-pressed', pressed);
      button.tabIndex = pressed ? 0 : -1;
    }
  }

  async fetchHeads(signal) {
    const answer = await ask('tgen/heads', { model: this.facts.name, ids: this.ids }, signal);
    const box = byId('thumbnails');
    const heads = answer.pictures[0].map((_, head) => head);
    box.style.setProperty('--heads', heads.length);
    const cells = [make('span'), ...heads.map((head) => make('span', {}, head))];
    answer.pictures.forEach((row, layer) => {
      cells.push(make('span', {}, layer));
      row.forEach((picture, head) => {
        const name = `Layer ${layer}, head ${head}`;
        const button = make('button', {
          type: 'button', title: name, 'aria-label': name, 'data-layer': layer, 'data-head': head,
        }, this.picture(fromBase64(picture), answer.side));
        button.addEventListener('click', () => this.pick(layer, head));
        cells.push(button);
      });
    });
    box.replaceChildren(...cells);
    this.mark();
  }

  picture(bytes, side) {
    const canvas = make('canvas', { width: side, height: side });
    const image = new ImageData(side, side);
    bytes.forEach((value, i) => {
      if (i % side > i / side) return;  /* later keys stay transparent */
      image.data.set([...this.colors[shadeOf(value / 255)], 255], 4 * i);
    });
    canvas.getContext('2d').putImageData(image, 0, 0);
    return canvas;
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
