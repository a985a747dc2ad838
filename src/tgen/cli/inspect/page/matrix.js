'use strict';
/* The large matrix: weights, labels or numbers at the sides, and a frame around what is read. */

const LABELLED = 11;  /* from so many pixels a cell on, each row has its token beside it */
const FONT = '11px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

class MatrixView {
  /* `point` hears of the cell under the pointer or null, `choose` of the one clicked. */
  constructor(canvas, { point, choose }) {
    this.canvas = canvas;
    this.weights = make('canvas');
    this.painted = null;
    this.frame = canvas.parentElement;
    canvas.addEventListener('pointermove', (event) => point(this.cellAt(event)));
    canvas.addEventListener('pointerleave', () => point(null));
    canvas.addEventListener('click', (event) => {
      const cell = this.cellAt(event);
      if (cell) choose(cell);
    });
    this.resize();
    new ResizeObserver(() => this.resize()).observe(this.frame);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
  }

  show(matrix, cell, { follow }) {
    if (matrix !== this.painted) paint(this.weights, matrix.values);
    this.painted = matrix;
    this.cell = cell;
    this.draw();
    if (follow && this.step) {
      const [x, y] = [cell.key, cell.query].map((i) => this.margin + i * this.step);
      reveal(this.frame, x, y, this.step, this.step);
    }
  }

  /* Cells are as wide as fits, wide ones a whole number of the screen's pixels; but never so narrow
     that some would get none. */
  resize() {
    this.ratio = devicePixelRatio || 1;
    const room = this.frame.clientWidth;
    if (room === this.room) return;
    this.room = room;
    const pen = this.canvas.getContext('2d');
    pen.font = FONT;
    const longest = Math.max(...data.tokens.map(({ label }) => pen.measureText(label).width));
    const wide = Math.ceil(Math.min(longest + 14, 110, room / 4));
    this.labelled = (room - wide) / size >= LABELLED;
    this.margin = this.labelled ? wide : 34;
    const pixels = ((room - this.margin - 2) * this.ratio) / size;
    const whole = pixels < 8 ? Math.max(pixels, 1) : Math.floor(pixels);
    this.step = Math.min(whole / this.ratio, 44);
    this.frame.classList.toggle('scrolls', pixels < 1);
    const side = Math.ceil(this.margin + this.step * size + 2);
    this.canvas.width = this.canvas.height = Math.ceil(side * this.ratio);
    this.canvas.style.width = this.canvas.style.height = `${side}px`;
    this.draw();
  }

  cellAt(event) {
    const at = (offset) => Math.floor((offset - this.margin) / this.step);
    const box = this.canvas.getBoundingClientRect();
    const [query, key] = [at(event.clientY - box.top), at(event.clientX - box.left)];
    const inside = query >= 0 && key >= 0 && query < size && key < size;
    return inside ? { query, key } : null;
  }

  draw() {
    if (!this.painted || !this.step) return;
    const { margin, step } = this;
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name);
    const side = step * size;
    const pen = this.canvas.getContext('2d');
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.hatch(pen, colour('--hatch'));
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.weights, margin, margin, side, side);
    pen.font = FONT;
    pen.textBaseline = 'middle';
    if (this.labelled) this.drawLabels(pen, colour('--soft'), colour('--ink'));
    else this.drawNumbers(pen, colour('--soft'), colour('--ink'));
    this.drawCell(pen, colour('--ink'), colour('--paper'));
  }

  /* Where no weight can be: lines, so that it is not taken for a weight of 0. */
  hatch(pen, colour) {
    const { margin } = this;
    const side = this.step * size;
    pen.save();
    pen.beginPath();
    pen.rect(margin, margin, side, side);
    pen.clip();
    pen.beginPath();
    for (let at = 0; at < 2 * side; at += 7) {
      pen.moveTo(margin + at, margin);
      pen.lineTo(margin + at - side, margin + side);
    }
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.stroke();
    pen.restore();
  }

  drawLabels(pen, soft, ink) {
    const { margin, step, cell } = this;
    data.tokens.forEach(({ label }, i) => {
      const text = this.shortened(pen, label, margin - 10);
      const middle = margin + (i + 0.5) * step;
      pen.fillStyle = i === cell.query ? ink : soft;
      pen.textAlign = 'right';
      pen.fillText(text, margin - 6, middle);
      pen.save();
      pen.translate(middle, margin - 6);
      pen.rotate(-Math.PI / 2);
      pen.fillStyle = i === cell.key ? ink : soft;
      pen.textAlign = 'left';
      pen.fillText(text, 0, 0);
      pen.restore();
    });
  }

  shortened(pen, label, room) {
    const fits = (text) => pen.measureText(text).width <= room;
    const characters = [...label];
    if (fits(label)) return label;
    while (characters.length && !fits(`${characters.join('')}…`)) characters.pop();
    return `${characters.join('')}…`;
  }

  drawNumbers(pen, soft, ink) {
    const { margin, step, cell } = this;
    const apart = [5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * step >= 30) ?? 1000;
    const number = (i, name, colour) => {
      const middle = margin + (i + 0.5) * step;
      pen.fillStyle = colour;
      pen.textAlign = name === 'query' ? 'right' : 'center';
      if (name === 'query') pen.fillText(i, margin - 6, middle);
      else pen.fillText(i, Math.min(middle, margin + step * size - 9), margin - 12);
    };
    for (const name of ['query', 'key']) {
      const at = cell[name];
      for (let i = 0; i < size; i += apart) {
        if (Math.abs(i - at) * step >= 26) number(i, name, soft);
      }
      number(at, name, ink);
    }
  }

  /* The row up to the diagonal, the column from it on, and the cell where they meet. */
  drawCell(pen, ink, paper) {
    const { margin, step } = this;
    const { query, key } = this.cell;
    const side = step * size;
    const [x, y] = [margin + key * step, margin + query * step];
    pen.lineWidth = 1;
    pen.strokeStyle = ink;
    pen.globalAlpha = 0.35;
    pen.strokeRect(margin - 0.5, y - 0.5, side + 1, step + 1);
    pen.strokeRect(x - 0.5, margin - 0.5, step + 1, side + 1);
    pen.globalAlpha = 1;
    pen.strokeStyle = paper;
    pen.lineWidth = 4;
    pen.strokeRect(x - 1, y - 1, step + 2, step + 2);
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, y - 1, step + 2, step + 2);
  }
}
