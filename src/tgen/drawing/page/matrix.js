'use strict';
/* The large matrix: weights, axis labels, and a frame around the selected cell. */

const MIN_LABELED_STEP = 11;  /* pixels per cell from which rows and columns show their tokens */
const FONT = '11px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

class MatrixView {
  /* `onHover` receives the cell under the pointer or null, `onSelect` the cell clicked. */
  constructor(canvas, { labels, colors, onHover, onSelect }) {
    this.canvas = canvas;
    this.labels = labels;
    this.colors = colors;
    this.weights = make('canvas');
    this.painted = null;
    this.frame = canvas.parentElement;
    canvas.addEventListener('pointermove', (event) => onHover(this.cellAt(event)));
    canvas.addEventListener('pointerleave', () => onHover(null));
    canvas.addEventListener('click', (event) => {
      const cell = this.cellAt(event);
      if (cell) onSelect(cell);
    });
    this.resize();
    new ResizeObserver(() => this.resize()).observe(this.frame);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
  }

  show(matrix, cell, { follow }) {
    if (matrix !== this.painted) paint(this.weights, matrix, this.colors);
    this.painted = matrix;
    this.cell = cell;
    this.draw();
    if (follow && this.step) {
      const [x, y] = [cell.key, cell.query].map((i) => this.margin + i * this.step);
      reveal(this.frame, x, y, this.step, this.step);
    }
  }

  /* Show the matrices of another text. */
  relabel(labels) {
    this.labels = labels;
    this.painted = this.frameWidth = null;
    this.resize();
  }

  /* Cells are as wide as fits: a whole number of device pixels where wide, and at least one. */
  resize() {
    this.ratio = devicePixelRatio || 1;
    const width = this.frame.clientWidth;
    if (width === this.frameWidth) return;
    this.frameWidth = width;
    const context = this.canvas.getContext('2d');
    context.font = FONT;
    const longest = Math.max(...this.labels.map((label) => context.measureText(label).width));
    const labelWidth = Math.ceil(Math.min(longest + 14, 110, width / 4));
    this.labeled = (width - labelWidth) / this.labels.length >= MIN_LABELED_STEP;
    this.margin = this.labeled ? labelWidth : 34;
    const pixels = ((width - this.margin - 2) * this.ratio) / this.labels.length;
    const cellPixels = pixels < 8 ? Math.max(pixels, 1) : Math.floor(pixels);
    this.step = Math.min(cellPixels / this.ratio, 44);
    this.frame.classList.toggle('scrolls', pixels < 1);
    const side = Math.ceil(this.margin + this.step * this.labels.length + 2);
    this.canvas.width = this.canvas.height = Math.ceil(side * this.ratio);
    this.canvas.style.width = this.canvas.style.height = `${side}px`;
    this.draw();
  }

  cellAt(event) {
    const index = (offset) => Math.floor((offset - this.margin) / this.step);
    const box = this.canvas.getBoundingClientRect();
    const [query, key] = [index(event.clientY - box.top), index(event.clientX - box.left)];
    const inside = query >= 0 && key >= 0 && query < this.labels.length && key < this.labels.length;
    return inside ? { query, key } : null;
  }

  draw() {
    if (!this.painted || !this.step) return;
    const { margin, step } = this;
    const style = getComputedStyle(this.canvas);
    const color = (name) => style.getPropertyValue(name);
    const side = step * this.labels.length;
    const context = this.canvas.getContext('2d');
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.hatch(context, color('--hatch'));
    context.imageSmoothingEnabled = false;
    context.drawImage(this.weights, margin, margin, side, side);
    context.font = FONT;
    context.textBaseline = 'middle';
    if (this.labeled) this.drawLabels(context, color('--soft'), color('--ink'));
    else this.drawNumbers(context, color('--soft'), color('--ink'));
    this.drawCell(context, color('--ink'), color('--paper'));
  }

  /* Hatch the masked cells, so that they do not look like weights of 0. */
  hatch(context, color) {
    const { margin } = this;
    const side = this.step * this.labels.length;
    context.save();
    context.beginPath();
    context.rect(margin, margin, side, side);
    context.clip();
    context.beginPath();
    for (let x = 0; x < 2 * side; x += 7) {
      context.moveTo(margin + x, margin);
      context.lineTo(margin + x - side, margin + side);
    }
    context.strokeStyle = color;
    context.lineWidth = 1;
    context.stroke();
    context.restore();
  }

  drawLabels(context, soft, ink) {
    const { margin, step, cell } = this;
    this.labels.forEach((label, i) => {
      const text = this.shorten(context, label, margin - 10);
      const middle = margin + (i + 0.5) * step;
      context.fillStyle = i === cell.query ? ink : soft;
      context.textAlign = 'right';
      context.fillText(text, margin - 6, middle);
      context.save();
      context.translate(middle, margin - 6);
      context.rotate(-Math.PI / 2);
      context.fillStyle = i === cell.key ? ink : soft;
      context.textAlign = 'left';
      context.fillText(text, 0, 0);
      context.restore();
    });
  }

  shorten(context, label, maxWidth) {
    const fits = (text) => context.measureText(text).width <= maxWidth;
    const characters = [...label];
    if (fits(label)) return label;
    while (characters.length && !fits(`${characters.join('')}…`)) characters.pop();
    return `${characters.join('')}…`;
  }

  drawNumbers(context, soft, ink) {
    const { margin, step, cell } = this;
    const interval = [5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * step >= 30) ?? 1000;
    const drawNumber = (i, name, color) => {
      const middle = margin + (i + 0.5) * step;
      context.fillStyle = color;
      context.textAlign = name === 'query' ? 'right' : 'center';
      if (name === 'query') context.fillText(i, margin - 6, middle);
      else context.fillText(i, Math.min(middle, margin + step * this.labels.length - 9), margin - 12);
    };
    for (const name of ['query', 'key']) {
      const selected = cell[name];
      for (let i = 0; i < this.labels.length; i += interval) {
        if (Math.abs(i - selected) * step >= 26) drawNumber(i, name, soft);
      }
      drawNumber(selected, name, ink);
    }
  }

  /* Frame the selected row, column and cell. */
  drawCell(context, ink, paper) {
    const { margin, step } = this;
    const { query, key } = this.cell;
    const side = step * this.labels.length;
    const [x, y] = [margin + key * step, margin + query * step];
    context.lineWidth = 1;
    context.strokeStyle = ink;
    context.globalAlpha = 0.35;
    context.strokeRect(margin - 0.5, y - 0.5, side + 1, step + 1);
    context.strokeRect(x - 0.5, margin - 0.5, step + 1, side + 1);
    context.globalAlpha = 1;
    context.strokeStyle = paper;
    context.lineWidth = 4;
    context.strokeRect(x - 1, y - 1, step + 2, step + 2);
    context.strokeStyle = ink;
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, step + 2, step + 2);
  }
}
